"""Layers that torch.compile traces for a GPU as one graph, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor

from moe import MoEConfig, MoELayer
from tests.support.fake_gpu import shapes

SIZES = {"d_model": 256, "d_ff": 128, "num_experts": 16, "top_k": 4}
TOKENS = 512
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared experts": {"num_shared_experts": 1},
    "DeepSeek-V3": {
        "score_func": "sigmoid", "expert_bias": True, "n_groups": 4, "topk_groups": 2,
        "topk_per_group": 2,
    },
    "fixed, probs": {"capacity": {"policy": "fixed", "drop_policy": "probs"}},
    "fixed, reroute": {"capacity": {"policy": "fixed", "drop_policy": "reroute"}},
    "straggler_aware": {"capacity": {"policy": "straggler_aware"}},
}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """``{"graphs": 1}``; raises where the layer is not one graph."""
    shapes.start()
    # A compiler would ask a CUDA build for the device's properties.
    torch.backends.cuda.is_built = lambda: False
    torch._dynamo.reset()
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            layer = MoELayer(MoEConfig(**(SIZES | CASES[name])))
            x = torch.randn(TOKENS, SIZES["d_model"], dtype=torch.bfloat16, requires_grad=True)
        shapes.cast(layer, torch.bfloat16)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        out = compiled(x)
        (out.hidden.float().sum() + out.aux.aux_loss).backward()
        return {"graphs": 1}
