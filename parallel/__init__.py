"""Device meshes, shard layouts, collectives, and functions that parallelize a model.

``dir(parallel)`` lists the public names. ``parallel.layout`` can be imported without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
