"""MegaBlocks on a CPU, for tests: its Triton kernels in Triton's interpreter.

``make test-megablocks`` installs the released packages in ``build/megablocks``, without the two
extensions that CUDA compiles; ``compiled/`` stands in for these. ``without_cuda/`` is for their
installation.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from bench.peers import Peer, dmoe
from moe import MoELayer
from moe.experts.megablocks_backend import PACKAGES


def is_ready() -> bool:
    """Whether this is the environment of ``make test-megablocks``; imports nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1" and all(map(find_spec, PACKAGES))


@cache
def import_megablocks() -> None:
    """Import it without its warnings, of torch's functions that it still calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megablocks")


@contextmanager
def on_cpu(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Inside, the backend runs on a CPU in ``dtype``.

    Convoy's rule, bfloat16 on CUDA, is lifted, and where the dtype is another one that of the GEMM.
    Triton's tuner would time kernels on a GPU: the first of each kernel's configs is taken.
    """
    import_megablocks()
    import grouped_gemm_backend as gemm
    from triton.runtime.autotuner import Autotuner

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **kwargs, **tuner.configs[0].all_kwargs())

    with (
        mock.patch("moe.experts.paths.why_no_megablocks", return_value=""),
        mock.patch.object(gemm, "DTYPES", {torch.bfloat16, dtype}),
        mock.patch.object(Autotuner, "run", run),
    ):
        gemm.CALLS.clear()
        yield


def dmoe_like(layer: MoELayer, **more: Any) -> Peer:
    """MegaBlocks' dMoE with a layer's parameters; ``more`` are fields of its ``Arguments``."""
    import_megablocks()
    c, fields = layer.config, {}
    if c.activation == "gelu":
        fields = {"mlp_type": "mlp", "activation_fn": torch.nn.functional.gelu}
    normalize = 1 if c.norm_topk_prob else None
    return dmoe(layer, moe_normalize_expert_weights=normalize, **fields | more)
