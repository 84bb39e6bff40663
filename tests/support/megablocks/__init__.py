"""MegaBlocks on a CPU, for tests: its Triton kernels in Triton's interpreter.

``make test-megablocks`` installs the released packages in ``build/megablocks``, without the two
extensions that CUDA compiles; ``compiled/`` stands in for these. ``without_cuda/`` is for their
installation.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

from moe import MoELayer
from moe.experts.megablocks_backend import PACKAGES


def is_ready() -> bool:
    """Whether this is the environment of ``make test-megablocks``; imports nothing."""
    return os.environ.get("TRITON_INTERPRET") == "1" and all(map(find_spec, PACKAGES))


@contextmanager
def on_cpu(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Inside, the backend runs on a CPU in ``dtype``.

    Convoy's rule, bfloat16 on CUDA, is lifted, and where the dtype is another one that of the GEMM.
    Triton's tuner would time kernels on a GPU: the first of each kernel's configs is taken.
    """
    import grouped_gemm_backend as gemm
    from triton.runtime.autotuner import Autotuner

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **kwargs, **tuner.configs[0].all_kwargs())

    with (
        mock.patch("moe.experts.paths.why_no_megablocks", lambda dtype, device_type: ""),
        mock.patch.object(gemm, "DTYPES", {torch.bfloat16, dtype}),
        mock.patch.object(Autotuner, "run", run),
    ):
        gemm.CALLS.clear()
        yield


def dmoe_like(layer: MoELayer, group: Any = None) -> Any:
    """MegaBlocks' dMoE of a layer's sizes and dtype; with ``group`` under expert parallelism."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    c, weight = layer.config, layer.experts.w_up
    gated = layer.experts.w_gate is not None
    act = torch.nn.functional.silu if c.activation == "swiglu" else torch.nn.functional.gelu
    arguments = Arguments(
        hidden_size=c.d_model, ffn_hidden_size=c.d_ff, bias=False, return_bias=False,
        activation_fn=act, moe_num_experts=c.num_experts, moe_top_k=c.top_k,
        moe_normalize_expert_weights=1 if c.norm_topk_prob else None, moe_loss_weight=0.1,
        mlp_type="glu" if gated else "mlp", mlp_impl="grouped", fp16=False,
        bf16=weight.dtype == torch.bfloat16, device=torch.device("cpu"),
        moe_expert_model_parallelism=group is not None, expert_parallel_group=group,
    )  # fmt: skip
    return dMoE(arguments)
