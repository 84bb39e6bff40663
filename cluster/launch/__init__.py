"""A run on the engine of a cluster: a job is rendered to text, printed, and submitted."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
