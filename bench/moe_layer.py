"""Forward and backward of one MoE layer against dense products of the same active FLOPs.

    OMP_NUM_THREADS=1 python bench/moe_layer.py [--quick] [--json FILE]

The limit is the nine dense products of the layer (three forward, six backward) over all T·K rows
at once, into memory that is there already. transformers' Qwen3-MoE block is a peer where it is
installed. Routing is ``natural`` (random router), ``zipf`` (skewed) or ``worst`` (one set of
experts for all tokens).

Legend: T tokens, D d_model, F d_ff, E experts, K top_k, N = T·K routed rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

# A script's own folder comes first on its path.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.harness import Row, arguments, finish, interleave
from moe import MoEConfig, MoELayer

SIZES = {
    "small": {"T": 4096, "D": 512, "F": 512, "E": 32, "K": 4},
    "large": {"T": 4096, "D": 1024, "F": 1024, "E": 64, "K": 8},
}


def limit(T: int, D: int, F: int, E: int, K: int) -> Callable[[], None]:
    """Nine products of [N, D] by [D, F], its transposes and its gradients."""
    N = T * K
    x_ND, h_NF, w_DF = torch.randn(N, D), torch.randn(N, F), torch.randn(D, F)
    out_ND, out_NF, out_DF = torch.empty(N, D), torch.empty(N, F), torch.empty(D, F)

    def act() -> None:
        for _ in range(3):  # gate, up, and the gradient of what w_down multiplies
            torch.mm(x_ND, w_DF, out=out_NF)
        for _ in range(3):  # down, and the gradients of gate's and up's input
            torch.mm(h_NF, w_DF.t(), out=out_ND)
        for _ in range(3):  # the gradients of the three weights
            torch.mm(x_ND.t(), h_NF, out=out_DF)

    return act


def set_routing(weight_ED: Tensor, x_TD: Tensor, routing: str) -> Tensor:
    """Inputs that route as asked: a constant feature adds a fixed term to each expert's logit."""
    E = weight_ED.shape[0]
    with torch.no_grad():
        nn.init.normal_(weight_ED, std=0.02)
        bias_E = torch.zeros(E)
        if routing == "zipf":
            bias_E = -torch.arange(1, E + 1).float().log()
        elif routing == "worst":
            bias_E = -torch.arange(E).float() * 10
        weight_ED[:, 0] = bias_E
        x_TD = x_TD.clone()
        x_TD[:, 0] = 1.0
    return x_TD


def run(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients to the input and to every parameter."""

    def act() -> None:
        out = layer(x.detach().requires_grad_())
        hidden = out[0] if isinstance(out, tuple) else out
        hidden.backward(grad)
        for parameter in layer.parameters():
            parameter.grad = None

    return act


def qwen3(D: int, F: int, E: int, K: int, how: str) -> nn.Module | None:
    """transformers' block, or None where it is not installed."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        return None
    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K,
        norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = how
    block: nn.Module = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def bench(name: str, routing: str, samples: int) -> list[Row]:
    """All subjects on one case."""
    size = SIZES[name]
    T, D, F, E, K = size["T"], size["D"], size["F"], size["E"], size["K"]
    torch.manual_seed(0)
    subjects: dict[str, Callable[[], None]] = {"limit": limit(T, D, F, E, K)}
    x_TD, grad = torch.randn(T, D), torch.randn(T, D)
    config = MoEConfig(d_model=D, d_ff=F, num_experts=E, top_k=K)
    for subject, layer in (
        ("convoy", MoELayer(config)),
        ("convoy loop", MoELayer(config.model_copy(update={"backend": "loop"}))),
    ):
        subjects[subject] = run(layer, set_routing(layer.router.weight, x_TD, routing), grad)
    for how in ("eager", "grouped_mm"):
        block = qwen3(D, F, E, K, how)
        if block is not None:
            weight = dict(block.named_parameters())["gate.weight"]
            x = set_routing(weight, x_TD, routing).unsqueeze(0)
            subjects[f"transformers {how}"] = run(block, x, grad.unsqueeze(0))
    case = f"{routing} {name} {torch.get_num_threads()} threads"
    return interleave(case, "forward_backward_seconds", subjects, samples)


def main() -> None:
    args = arguments(__doc__ or "")
    cases = [(name, routing) for name in SIZES for routing in ("natural", "zipf", "worst")]
    cases = [case for case in cases if args.only in f"{case[1]} {case[0]}"]
    if args.quick:
        cases, args.samples = [("small", "natural")], 5
    rows = [row for name, routing in cases for row in bench(name, routing, args.samples)]
    finish("moe_layer", rows, ["torch", "transformers", "numpy"], args.json)


if __name__ == "__main__":
    main()
