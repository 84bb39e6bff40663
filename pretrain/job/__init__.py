"""Everything that a rank's run is made of, built from the spec."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
