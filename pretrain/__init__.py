"""Pretraining: what a training rank imports, and nothing else.

``pretrain.run`` trains as a :class:`pretrain.JobSpec` says; ``convoy`` has the commands around a
run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
