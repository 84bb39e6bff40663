"""Saving while training goes on: the trainer's side and the writer process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
