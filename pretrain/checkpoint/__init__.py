"""When a run saves, where it saves, and what a start makes of what was saved."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
