"""Kernels for CUDA, in Triton: the choice of experts, and the sort of assignments by expert."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
