"""Which machines are in a launch: when new ones join, and which must not."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
