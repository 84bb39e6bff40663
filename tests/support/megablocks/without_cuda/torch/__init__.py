"""In the place of torch while pip builds MegaBlocks and grouped_gemm without their CUDA parts.

Their ``setup.py`` ask torch for a CUDA toolkit; grouped_gemm's stops without one. ``make
test-megablocks`` puts the folder above this one on PYTHONPATH of pip, and of nothing else.
"""

__version__ = "0"
