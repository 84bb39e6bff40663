"""CUDA paths without a GPU, on a CPU build of torch.

:mod:`.values` is a device "cuda" with real numbers in host memory, and real ranks on gloo. A small
C++ file, which :mod:`.build` compiles, makes the device believable to torch.
"""
