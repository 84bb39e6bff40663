"""The released MegaBlocks under Convoy's layer, and beside it as its own dMoE, on a CPU.

Its Triton kernels run in Triton's interpreter; the two extensions that need CUDA have stand-ins,
see tests/support/megablocks. ``make test-megablocks`` installs the packages and runs this file.

Legend: T tokens, D d_model, F d_ff, E experts, K top_k.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe
import moe.testing
from bench.moe_layer import set_routing
from bench.peers import check, convoy, dmoe, results
from moe import MoEConfig, MoELayer, Rows
from moe.experts.megablocks_backend import experts_megablocks
from moe.experts.paths import experts_loop
from moe.testing import CASES, passes_on_rank, tokens_of
from parallel import ParallelDims, Topology, apply_expert_parallel
from tests.support.megablocks import dmoe_like, is_ready, on_cpu
from tests.support.ranks import run_ranks

if not is_ready():
    pytest.skip("run by make test-megablocks", allow_module_level=True)

D, F = 32, 40
CLOSE = 1e-6


def make_layer(E: int = 8, K: int = 2, **fields: Any) -> MoELayer:
    """A layer whose experts MegaBlocks computes."""
    torch.manual_seed(0)
    config = {"norm_topk_prob": K > 1, "backend": "megablocks", **fields}
    layer = MoELayer(MoEConfig(num_experts=E, top_k=K, d_model=D, d_ff=F, **config))
    with torch.no_grad():
        layer.router.weight.mul_(5)
    return layer


def plain_of(layer: MoELayer) -> MoELayer:
    """The same layer with a loop over experts."""
    plain = MoELayer(layer.config.model_copy(update={"backend": "loop"}))
    plain.load_state_dict(layer.state_dict())
    return plain


def same(got: Tensor | None, wanted: Tensor | None, name: str, to: float = CLOSE) -> None:
    """Equal to ``to`` of the largest number."""
    assert got is not None
    assert wanted is not None
    assert got.shape == wanted.shape, name
    if wanted.numel():
        error = ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
        assert error <= to, f"{name} differs by {error:.1e}"


def one_pass(call: Any, x_TD: Tensor, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the gradient of the input."""
    x_TD = x_TD.clone().requires_grad_()
    hidden_TD = call(x_TD)
    hidden_TD.backward(grad_TD)
    assert x_TD.grad is not None
    return hidden_TD.detach(), x_TD.grad


def same_gradients(layer: MoELayer, wanted: dict[str, Tensor | None], to: float = CLOSE) -> None:
    for name, parameter in layer.named_parameters():
        same(parameter.grad, wanted[name], name, to)


def gradients_of(module: Any) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_the_packages_are_the_released_ones():
    for name, number in (("megablocks", "0.10.0"), ("stanford-stk", "0.7.1"),
                         ("grouped_gemm", "0.3.0")):  # fmt: skip
        assert version(name) == number


# ------------------------------------------------------------------------------------------------
# One process.


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("E", "K", "T"), [(8, 2, 37), (8, 1, 21), (16, 4, 33), (16, 4, 1), (8, 2, 2), (5, 3, 7)]
)
def test_outputs_gradients_and_counts_are_those_of_the_loop_and_of_dmoe(E, K, T, activation):
    layer = make_layer(E, K, activation=activation, aux_loss_coeff=0.0)
    plain = plain_of(layer)
    x_TD, grad_TD = torch.randn(T, D), torch.randn(T, D)
    wanted = one_pass(lambda x: plain(x).hidden, x_TD, grad_TD)
    counts_E = plain(x_TD).aux.tokens_per_expert_E
    assert T > 2 or (counts_E == 0).any(), "no expert is without tokens"
    with on_cpu():
        from megablocks.layers import moe as theirs

        peer = dmoe_like(layer, moe_loss_weight=0.1)
        for got in (one_pass(lambda x: layer(x).hidden, x_TD, grad_TD),
                    one_pass(peer.call, x_TD, grad_TD)):  # fmt: skip
            same(got[0], wanted[0], "hidden")
            same(got[1], wanted[1], "x")
        aux = layer(x_TD).aux
        ((their_counts_E, _),) = theirs.get_load_balancing_loss()
        assert torch.equal(aux.tokens_per_expert_E, their_counts_E.long())
        loss = theirs.batched_load_balancing_loss(peer.module.experts.args) / 0.1
        theirs.clear_load_balancing_loss()
    same(aux.load_balance_loss, loss, "load_balance_loss")
    same_gradients(layer, gradients_of(plain))
    # Theirs, read as ours.
    grads = {name: p.grad for name, p in peer.module.named_parameters()}
    as_ours = make_layer(E, K, activation=activation)
    moe.load_megablocks_state_dict(as_ours, grads)
    for name, parameter in as_ours.named_parameters():
        same(parameter.detach(), plain.get_parameter(name).grad, f"dMoE's {name}")


def test_no_tokens_are_an_ordinary_case():
    layer = make_layer(num_shared_experts=1, ffn_bias=True)
    with on_cpu():
        peer = dmoe_like(make_layer())
        for call in (lambda x: layer(x).hidden, peer.call):
            hidden_TD, dx_TD = one_pass(call, torch.zeros(0, D), torch.zeros(0, D))
            assert hidden_TD.shape == dx_TD.shape == (0, D)
    for module in (layer.experts, peer.module):
        for name, grad in gradients_of(module).items():
            assert grad is not None, name
            assert not grad.any(), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ([0, 3, 1, 1, 4], [2, 0, 3, 0]),  # a row has two assignments, another none
        ([0, 1, 2, 0, 1, 2], [3, 0, 3, 0]),  # all have two
        ([2, 2, 2, 2], [1, 1, 1, 1]),
        ([], [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_of_any_number_of_assignments_with_biases_and_padding(source, counts, bias, padding):
    layer = make_layer(4, ffn_bias=bias)
    weights = layer.experts.local_weights().map(lambda p: torch.randn_like(p).requires_grad_())
    S = 3 if len(source) == 6 else 5
    x_SD, weights_R = torch.randn(S, D), torch.rand(len(source) + padding)
    source_R, counts_E = torch.tensor([*source, *[1] * padding]).long(), torch.tensor(counts)
    grad_SD = torch.randn(S, D)

    def run(path: Any) -> list[Tensor]:
        leaves = [x_SD.clone().requires_grad_(), weights_R.clone().requires_grad_()]
        rows = Rows(leaves[0], source_R.clone(), leaves[1], counts_E)
        out = path(rows, weights, "swiglu")
        parameters = [p for p in weights if p is not None]
        return [out, *torch.autograd.grad(out, [*leaves, *parameters], grad_SD)]

    with on_cpu():
        got = run(experts_megablocks)
    for number, (a, b) in enumerate(zip(got, run(experts_loop), strict=True)):
        same(a.detach(), b.detach(), f"tensor {number}")


def test_megablocks_is_what_runs():
    layer, x_TD = make_layer(), torch.randn(9, D)
    with on_cpu(), ExitStack() as stack:
        import megablocks_ops
        from megablocks.backend import kernels

        spied = {
            name: stack.enter_context(mock.patch.object(of, name, wraps=getattr(of, name)))
            for of, names in ((kernels, "gather scatter scatter_wgrad"),
                              (megablocks_ops, "sort histogram inclusive_cumsum"))
            for name in names.split()
        }  # fmt: skip
        import grouped_gemm_backend

        hidden_TD = layer(x_TD.requires_grad_()).hidden
        assert len(grouped_gemm_backend.CALLS) == 3
        hidden_TD.sum().backward()
        assert len(grouped_gemm_backend.CALLS) == 9
    calls = {name: spy.call_count for name, spy in spied.items()}
    assert calls == {
        "gather": 2, "scatter": 2, "scatter_wgrad": 1, "sort": 1, "histogram": 1,
        "inclusive_cumsum": 1,
    }  # fmt: skip


def test_recomputed_experts_have_the_same_gradients():
    layer, x_TD, grad_TD = make_layer(), torch.randn(9, D), torch.randn(9, D)
    again = make_layer(recompute_experts=True)
    with on_cpu():
        for each in (layer, again):
            one_pass(lambda x, each=each: each(x).hidden, x_TD, grad_TD)
    same_gradients(again, gradients_of(layer), 0.0)


def test_bfloat16_passes_the_product_s_own_checks_and_float32_does_not():
    layer = make_layer().bfloat16()
    plain, x_TD, grad_TD = plain_of(layer).bfloat16(), torch.randn(9, D), torch.randn(9, D)
    x_TD, grad_TD = x_TD.bfloat16(), grad_TD.bfloat16()
    wanted = one_pass(lambda x: plain(x).hidden, x_TD, grad_TD)
    with on_cpu(torch.bfloat16):
        got = one_pass(lambda x: layer(x).hidden, x_TD, grad_TD)
        with pytest.raises(RuntimeError, match=r"grouped_gemm_backend: torch.float32"):
            make_layer()(torch.randn(9, D))
    for name, a, b in zip(("hidden", "x"), got, wanted, strict=True):
        same(a, b, name, 2e-2)
    same_gradients(layer, gradients_of(plain), 2e-2)


def test_the_rule_of_the_product_stands():
    with pytest.raises(ValueError, match=r"must have bfloat16 on cuda, not torch.float32 on cpu"):
        make_layer()(torch.randn(3, D))
    assert moe.choose_backend("megablocks", D, F, torch.bfloat16, "cuda") == "megablocks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bench_times_the_same_work(dtype):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(num_experts=8, top_k=2, d_model=D, d_ff=F)).to(dtype)
    x_TD = set_routing(layer.router.weight, torch.randn(64, D).to(dtype), 2, "zipf")
    grad_TD = torch.randn(64, D).to(dtype)
    with on_cpu(dtype):
        got = results(dmoe(layer), x_TD, grad_TD)
    check("megablocks", got, results(convoy(layer), x_TD, grad_TD))


@pytest.mark.parametrize("recompute", [False, True])
def test_adopted_experts_run_without_copies_of_weights(recompute):
    from tests.support.hf import make_model, tokens

    batch = tokens()[:1, :6]
    wanted_model = moe.adopt(make_model("mixtral"), backend="loop")
    model = moe.adopt(make_model("mixtral"), backend="megablocks", recompute_experts=recompute)
    stored = {p.data_ptr() for name, p in model.named_parameters() if "experts" in name}
    with on_cpu():
        import grouped_gemm_backend

        out = model(batch, labels=batch)
        out.loss.backward()
        weights = [(b, trans_b) for b, trans_b in grouped_gemm_backend.CALLS if b.ndim == 3]
    assert {trans_b for _, trans_b in weights} == {True, False}, "forward and backward"
    assert all(b.data_ptr() in stored for b, _ in weights), "a weight was copied"
    wanted = wanted_model(batch, labels=batch)
    wanted.loss.backward()
    same(out.logits, wanted.logits, "logits", 1e-5)
    for (name, ours), other in zip(
        model.named_parameters(), wanted_model.parameters(), strict=True
    ):
        same(ours.grad, other.grad, name, 1e-5)


# ------------------------------------------------------------------------------------------------
# Weights in and out.


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_weights_go_to_dmoe_and_back(activation):
    layer, other = make_layer(activation=activation), make_layer(activation=activation)
    state = moe.megablocks_state_dict(layer, "ffn.")
    peer = dmoe_like(layer)
    theirs = peer.module.state_dict(prefix="ffn.")
    assert state.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, state[name]), name
    with torch.no_grad():
        for parameter in (*other.parameters(), *layer.parameters()):
            parameter.add_(1)
    moe.load_megablocks_state_dict(other, theirs, "ffn.")
    for name, parameter in layer.named_parameters():
        same(parameter - 1, other.get_parameter(name), name)


# ------------------------------------------------------------------------------------------------
# Several ranks.

_FOR_THIS_PROCESS = ExitStack()


def prepare_rank(world: int) -> None:
    _FOR_THIS_PROCESS.enter_context(on_cpu())


@pytest.mark.parametrize(
    "fields",
    [
        {"ffn_bias": True},
        {"dispatcher": "padded_all_to_all", "max_tokens_per_call": moe.testing.MAX_TOKENS},
    ],
    ids=["all_to_all", "padded_all_to_all"],
)
def test_two_ranks_compute_what_one_process_does(fields):
    """The cases of the contract of dispatchers: also ranks that have, or get, no tokens."""
    on_ranks = run_ranks(passes_on_rank, 2, 2, {"backend": "megablocks", **fields}, 1, prepare_rank)
    bias = fields.get("ffn_bias", False)
    plain = moe.testing.make_layer(ffn_bias=bias, backend="loop")
    for number, case in enumerate(CASES):
        sums = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        for rank, x_TD in enumerate(tokens_of(case, 2)):
            wanted = moe.testing.one_pass(plain, x_TD, case)
            got, again = on_ranks[rank][2 * number : 2 * number + 2]
            for key in ("hidden", "x"):
                same(got[key], wanted[key], f"{case}: {key}")
                assert torch.equal(got[key], again[key]), f"{case}: {key} moves"
            for name, grad in gradients_of(plain).items():
                sums[name] += grad
        for name, grad in sums.items():
            same(on_ranks[0][2 * number][name], grad, f"{case}: {name}")


def on_rank_beside_dmoe(rank: int) -> dict[str, float]:
    """Tokens of two ranks through Convoy's layer and through dMoE, each with half the experts."""
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = make_layer(aux_loss_coeff=0.0)
    apply_expert_parallel(layer, dims.ep_mesh)
    generator = torch.Generator().manual_seed(rank)
    T = (19, 6)[rank]
    x_TD, grad_TD = (torch.randn(T, D, generator=generator) for _ in range(2))
    with on_cpu():
        peer = dmoe_like(
            layer, moe_expert_model_parallelism=True, expert_parallel_group=dist.group.WORLD
        )
        assert peer.module.experts.mlp.w1.shape == (4 * F, D)
        got = one_pass(lambda x: layer(x).hidden, x_TD, grad_TD)
        wanted = one_pass(peer.call, x_TD, grad_TD)
    errors = {name: far(a, b) for name, a, b in zip(("hidden", "x"), got, wanted, strict=True)}
    errors["router"] = far(layer.router.weight.grad, peer.router_weight_ED.grad)
    mlp, experts = peer.module.experts.mlp, layer.experts
    for name, ours, theirs in (
        ("w1", experts.w_gate.grad.mT, mlp.w1.grad), ("v1", experts.w_up.grad.mT, mlp.v1.grad),
        ("w2", experts.w_down.grad, mlp.w2.grad),
    ):  # fmt: skip
        # MegaBlocks' is the mean over ranks, and Convoy's the sum.
        errors[name] = far(ours.to_local(), 2 * theirs.view(4, F, D))
    return errors


def far(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def test_two_ranks_compute_what_dmoe_does():
    for errors in run_ranks(on_rank_beside_dmoe, 2):
        assert len(errors) == 6
        assert all(error <= CLOSE for error in errors.values()), errors


def test_the_stand_ins_have_the_signatures_of_the_callers():
    """The released callers name these parameters by their places."""
    import grouped_gemm_backend
    from grouped_gemm import backend

    assert backend.backend is grouped_gemm_backend
    assert len(inspect.signature(grouped_gemm_backend.gmm).parameters) == 6
