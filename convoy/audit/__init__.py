"""Proofs about recorded runs: the samples of each step, a step taken again, two runs compared."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
