"""Adapters of experts, routers and linear layers, and what a step has moved."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
