"""Checkpoints in zarr v3: saved, verified, and loaded on any number of ranks.

This door has what a training loop needs. The rooms have the rest: ``ckpt.store``, ``ckpt.format``,
``ckpt.lifecycle``, ``ckpt.write``, ``ckpt.read``, ``ckpt.background``, ``ckpt.rewrite``,
``ckpt.interop`` and ``ckpt.state_dict``. Arrays are known by name, shape and sharding; experts and
layers are not known.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
