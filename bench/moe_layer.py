"""Forward and backward of one MoE layer against dense products of the same active FLOPs.

    OMP_NUM_THREADS=1 python -m bench.moe_layer [--quick] [--json FILE]

The limit is the nine dense products of the layer (three forward, six backward) over all T·K rows
at once, into memory that is there already. Peers that are installed (bench/README.md) do the same
work with the same weights, and are held to Convoy's numbers before they are timed. Routing is
``natural`` (random router), ``zipf`` (skewed) or ``worst`` (one set of experts for all tokens).
A machine with a CUDA device times the size ``h200`` there (with ``--quick`` ``h200 quick``, which
says nothing but that the bench runs), any other the rest.

Legend: T tokens, D d_model, F d_ff, E experts, K top_k, N = T·K routed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.harness import Row, arguments, finish, interleave
from bench.peers import Peer, check, convoy, installed_peers, results
from moe import MoEConfig, MoELayer


@dataclass(frozen=True)
class Size:
    """One layer, and where it is timed."""

    T: int
    D: int
    F: int
    E: int
    K: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32


SIZES = {
    "small": Size(T=4096, D=512, F=512, E=32, K=4),
    "large": Size(T=4096, D=1024, F=1024, E=64, K=8),
    "h200": Size(T=16384, D=2048, F=1408, E=64, K=6, device="cuda", dtype=torch.bfloat16),
    "h200 quick": Size(T=256, D=128, F=96, E=8, K=2, device="cuda", dtype=torch.bfloat16),
}
MARGINS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def limit(size: Size) -> Callable[[], None]:
    """Nine products of [N, D] by [D, F], its transposes and its gradients."""
    N, D, F = size.T * size.K, size.D, size.F
    x_ND, h_NF, w_DF = (
        torch.randn(shape).to(size.device, size.dtype) for shape in ((N, D), (N, F), (D, F))
    )
    out_ND, out_NF, out_DF = map(torch.empty_like, (x_ND, h_NF, w_DF))

    def act() -> None:
        for _ in range(3):  # gate, up, and the gradient of what w_down multiplies
            torch.mm(x_ND, w_DF, out=out_NF)
        for _ in range(3):  # down, and the gradients of gate's and up's input
            torch.mm(h_NF, w_DF.t(), out=out_ND)
        for _ in range(3):  # the gradients of the three weights
            torch.mm(x_ND.t(), h_NF, out=out_DF)

    return act


@torch.no_grad()
def set_routing(weight_ED: Tensor, x_TD: Tensor, top_k: int, routing: str) -> Tensor:
    """Inputs that route as asked: a constant feature adds a fixed term to each expert's logit.

    A token whose last chosen expert and the next one nearly tie takes another token's features, so
    that rounding routes none of them otherwise for one subject than for another.
    """
    E = weight_ED.shape[0]
    nn.init.normal_(weight_ED, std=0.02)
    bias_E = torch.zeros(E)
    if routing == "zipf":
        bias_E = -torch.arange(1, E + 1).float().log()
    elif routing == "worst":
        bias_E = -torch.arange(E).float() * 10
    weight_ED[:, 0] = bias_E
    x_TD = x_TD.clone()
    x_TD[:, 0] = 1.0
    best_TK = (x_TD.float() @ weight_ED.float().t()).topk(min(top_k + 1, E)).values
    gap_T = best_TK[:, top_k - 1] - best_TK[:, -1] if top_k < E else torch.ones(len(x_TD))
    clear = (gap_T > MARGINS[x_TD.dtype]).nonzero().flatten()
    return x_TD[clear[torch.arange(len(x_TD), device=clear.device) % len(clear)]]


def run(peer: Peer, x_TD: Tensor, grad_TD: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients to the input and to every parameter."""

    def act() -> None:
        peer.call(x_TD.detach().requires_grad_()).backward(grad_TD)
        for parameter in peer.module.parameters():
            parameter.grad = None

    return act


def bench(name: str, routing: str, samples: int) -> list[Row]:
    """All subjects on one case."""
    size = SIZES[name]
    torch.manual_seed(0)
    x_TD = torch.randn(size.T, size.D).to(size.device, size.dtype)
    grad_TD = torch.randn(size.T, size.D).to(size.device, size.dtype)
    config = MoEConfig(d_model=size.D, d_ff=size.F, num_experts=size.E, top_k=size.K)
    layer = MoELayer(config).to(size.device, size.dtype)
    loop = MoELayer(config.model_copy(update={"backend": "loop"})).to(size.device, size.dtype)
    x_TD = set_routing(layer.router.weight, x_TD, size.K, routing)
    loop.load_state_dict(layer.state_dict())

    wanted = results(convoy(layer), x_TD, grad_TD)
    check("convoy loop", results(convoy(loop), x_TD, grad_TD), wanted)
    peers = {"convoy loop": convoy(loop)}
    for subject, peer in installed_peers(layer).items():
        try:
            found = results(peer, x_TD, grad_TD)
        except Exception as error:  # another project's, on a device that it may not know
            print(f"{subject} is left out: {type(error).__name__}: {error}")
            continue
        check(subject, found, wanted)
        peers[subject] = peer
    subjects = {"limit": limit(size), "convoy": run(convoy(layer), x_TD, grad_TD)}
    subjects |= {subject: run(peer, x_TD, grad_TD) for subject, peer in peers.items()}
    subjects["limit"]()  # the others have done their work once, for the check
    case = f"{routing} {name} {torch.get_num_threads()} threads"
    return interleave(case, "forward_backward_seconds", subjects, samples, warm=True)


PACKAGES = ["torch", "numpy", "transformers", "torchtitan", "megatron-core", "megablocks"]


def main() -> None:
    args = arguments(__doc__ or "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [name for name in SIZES if SIZES[name].device == device]
    if device == "cuda":
        sizes = [name for name in sizes if name.endswith("quick") == args.quick]
    cases = [(name, routing) for name in sizes for routing in ("natural", "zipf", "worst")]
    cases = [case for case in cases if args.only in f"{case[1]} {case[0]}"]
    if args.quick:
        cases, args.samples = [(sizes[0], "natural")], 3
    rows = [row for name, routing in cases for row in bench(name, routing, args.samples)]
    finish("moe_layer", rows, PACKAGES, args.json)


if __name__ == "__main__":
    main()
