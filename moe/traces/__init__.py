"""Traces of routing: how many tokens chose each expert, and which, call by call, in files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
