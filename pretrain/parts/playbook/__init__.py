"""The divergence playbook: what is done about a step, decided from numbers that all ranks have."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
