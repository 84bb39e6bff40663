"""The kernels of the router in Triton's interpreter, against plain operations."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from router import RouterConfig, RouterOutput, StandardBalancing, TopKRouter
from router import kernels as router_kernels
from router.balancing import balance_by_kernel
from router.kernels import select_experts, sort_assignments, sort_by_bin
from tests.support import kernels

kernels.need_triton(interpreter=True)
pytestmark = kernels.infinities_are_quiet
CASES = [
    {}, {"norm_topk_prob": False, "top_k": 1}, {"softmax_after_topk": True},
    {"softmax_after_topk": True, "expert_bias": True, "route_scale": 2.5},
    {"score_func": "sigmoid"}, {"score_func": "sigmoid", "norm_topk_prob": False},
    {"score_func": "sigmoid", "expert_bias": True, "route_scale": 2.5},
    {"expert_bias": True, "top_k": 5}, {"num_experts": 3}, {"num_experts": 40, "top_k": 8},
    {"balancing": "quantile"}, {"balancing": "quantile", "score_func": "sigmoid", "top_k": 5},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels_in_use():
    with kernels.only_when_asked(), kernels.in_use():
        yield


def a_router(fields, **more) -> TopKRouter:
    torch.manual_seed(1)
    config = RouterConfig(
        **{"num_experts": 7, "top_k": 2, **fields}, aux_loss_coeff=0.3, z_loss_coeff=0.2, **more
    )
    router = TopKRouter(16, config)
    torch.nn.init.normal_(router.weight, std=0.5)
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.3)
    return router


def takes_kernel(out: RouterOutput) -> bool:
    return type(out.expert_weights_TK.grad_fn).__name__ == "_SelectBackward"


def results(router: TopKRouter, x: torch.Tensor, exact: bool):
    router.exact, x = exact, x.clone().requires_grad_()
    router.zero_grad()
    out = router(x)
    loss = (out.expert_weights_TK * torch.arange(1.0, out.expert_weights_TK.shape[1] + 1)).sum()
    (loss + out.aux_loss).backward()
    return out, [x.grad, router.weight.grad]


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("tokens", [37, 1, 0])
def test_the_kernel_routes_as_plain_operations_do(fields, tokens):
    router = a_router(fields)
    x = torch.randn(tokens, 16)
    plain, plain_grads = results(router, x, exact=True)
    out, grads = results(router, x, exact=False)
    assert takes_kernel(out)
    assert not takes_kernel(plain)
    for name, a, b in zip(out._fields, out, plain, strict=True):
        if b is None or not b.is_floating_point():
            assert (a is None and b is None) or torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{n} {m}")
    for a, b in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_that_are_not_finite_are_flagged_and_still_choose(score_func, bias):
    config = RouterConfig(num_experts=7, top_k=2, score_func=score_func)
    logits = torch.randn(6, 7)
    bad = [torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf]
    for token, value in enumerate(bad):
        logits[token, token] = value
    logits[3] = torch.nan
    logits[4] = torch.inf
    bias_E = torch.tensor([0, 0, 0, 2.0, 0, 1.0, 0]) if bias else None
    chosen = select_experts(logits, bias_E, config)
    assert chosen.nonfinite_T.tolist() == [True] * 5 + [False]
    assert chosen.weights_TK.isnan().all(1).tolist() == [True] * 5 + [False]
    # All scores are taken to be equal: the lowest experts, or those with the highest biases.
    assert chosen.indices_TK[:5].tolist() == [[3, 5] if bias else [0, 1]] * 5
    assert chosen.tokens_per_expert_E.sum() == 12
    for field, expected in (
        (chosen.logsumexp_T, logits.logsumexp(-1)),
        (chosen.entropy_T[5:], -(chosen.probs_TE * chosen.probs_TE.log()).sum(-1)[5:]),
    ):
        torch.testing.assert_close(field, expected, equal_nan=True)


def test_equal_preferences_take_the_lowest_experts():
    config = RouterConfig(num_experts=9, top_k=4, softmax_after_topk=True)
    logits = torch.tensor([[0.0, -0.0, 1, 1, 0, -5, 1, 0, 1], [-3.0] * 9])
    assert select_experts(logits, None, config).indices_TK.tolist() == [[2, 3, 6, 8], [0, 1, 2, 3]]
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0, 0.0, 0.0]])
    assert select_experts(zeros, None, config).indices_TK.tolist() == [[0, 1, 2, 3]]
    logits[0, :5] = -torch.inf  # these are flagged, and a tie as well
    assert select_experts(logits, None, config).indices_TK[0].tolist() == [0, 1, 2, 3]
    bias = torch.tensor([-torch.inf] * 7 + [0.0, 0.0])
    assert sorted(select_experts(logits[1:], bias, config).indices_TK[0].tolist()) == [0, 1, 7, 8]


def test_sigmoids_that_underflow_have_probabilities_and_gradients():
    fields = {"score_func": "sigmoid", "norm_topk_prob": False, "expert_bias": True}
    router = a_router(fields)  # scores of 0 tie, and the biases choose
    x = torch.randn(5, 16)
    with torch.no_grad():
        router.weight.copy_(torch.full((7, 16), -8.0) + torch.arange(7.0).unsqueeze(1) * 0.01)
        x = x.abs() + 1
    (plain, plain_grads), (out, grads) = (results(router, x, exact=e) for e in (True, False))
    torch.testing.assert_close(out.aux_loss, plain.aux_loss)
    torch.testing.assert_close(out.entropy, plain.entropy)
    for a, b in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert plain.logits_TE.max() < -50


@pytest.mark.parametrize("tokens", [0, 1, 40, 5000])
def test_losses_and_statistics_are_those_of_plain_operations(tokens):
    config = RouterConfig(num_experts=20, top_k=3, aux_loss_coeff=0.3, z_loss_coeff=0.2)
    logits = torch.randn(tokens, 20)
    counts = torch.randint(1, 9, (20,))
    found, grads = [], []
    for standard in (True, False):
        chosen = select_experts(logits, None, config)
        inputs = [chosen.probs_TE.clone().requires_grad_(), chosen.logsumexp_T.requires_grad_()]
        bad = torch.arange(tokens) % 3 == 0
        chosen = chosen._replace(probs_TE=inputs[0], logsumexp_T=inputs[1], nonfinite_T=bad)
        rule = StandardBalancing(config) if standard else OtherRule(config)
        each = balance_by_kernel(rule, logits, chosen, counts, None, None)
        assert (type(each.total.grad_fn).__name__ == "_BalanceBackward") is standard
        for loss in (each.total, 2 * each.z + each.load_balance, each.total + each.load_balance):
            grads.append(torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True))
        found.append(each)
    for name, a, b in zip(found[0]._fields, *found, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n} {m}")
    for a, b in zip(grads[:3], grads[3:], strict=True):
        torch.testing.assert_close(a, b)


class OtherRule(StandardBalancing):
    def losses(self, tokens):
        return super().losses(tokens)


@pytest.mark.parametrize("change", [{"seq_aux_loss_coeff": 0.1}, {}])
def test_other_losses_are_left_to_plain_operations(change):
    router = a_router(change)
    out = router(torch.randn(9, 16))
    assert takes_kernel(out)
    assert (type(out.aux_loss.grad_fn).__name__ == "_BalanceBackward") is (not change)
    assert (out.sequence_balance_loss > 0) == bool(change)


@pytest.mark.parametrize("fields", CASES[:7], ids=str)
def test_the_gradient_has_a_gradient(fields):
    router = a_router(fields)
    grads = []
    for exact in (True, False):
        router.exact = exact
        x = torch.linspace(-1, 1, 3 * 16).view(3, 16).requires_grad_()
        out = router(x)
        loss = out.expert_weights_TK.square().sum() + out.aux_loss
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        grads.append(torch.autograd.grad(dx.square().sum(), [x, router.weight]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [{"n_groups": 2, "topk_groups": 1, "num_experts": 8, "topk_per_group": 1},
     {"num_experts": 34, "top_k": 33}, {"num_experts": 1025},
     {"routing": "expert_choice"}, {"capacity": {"policy": "fixed"}},
     {"score_func": "sqrtsoftplus"},
     {"capacity": {"max_tokens_per_rank": 20}}],
)  # fmt: skip
def test_what_the_kernel_does_not_do_is_left_to_plain_operations(change):
    assert not takes_kernel(a_router(change)(torch.randn(9, 16)))


@pytest.mark.parametrize("how", ["mask", "replay", "float64"])
def test_calls_that_the_kernel_does_not_do_are_left_to_plain_operations(how, monkeypatch):
    # As on an accelerator: on the host padding is taken out before.
    monkeypatch.setattr("router.topk.token_rows_of", lambda _: None)
    router, x = a_router({}), torch.randn(9, 16)
    record = router(x).topk_indices_TK
    out = {
        "mask": lambda: router(x, token_mask_T=torch.ones(9, dtype=torch.bool)),
        "replay": lambda: router(x, replay_indices_TK=record),
        "float64": lambda: router.double()(x.double()),
    }[how]()
    assert not takes_kernel(out)


@pytest.mark.parametrize(
    ("bins", "length"),
    [*product([1, 2, 9, 128], [0, 1, 127, 128, 700]), (1024, 700), (1025, 700), (5000, 700)],
)
def test_the_sort_by_counting_is_stable_and_counts(bins, length):
    numbers = torch.randint(bins, (length,))
    if length > 2:
        numbers[::3] = numbers[0]  # many of one bin, and others empty
    order, counts = sort_by_bin(numbers, bins)
    assert torch.equal(order, numbers.argsort(stable=True))
    assert torch.equal(counts[1:], torch.bincount(numbers, minlength=bins))
    assert counts[0] == 0


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "first", "block", "blocks"),
    [(50, 8, 0, 1, 6), (50, 3, 4, 1, 6), (37, 8, 2, 3, 2), (700, 1, 0, 2, 4), (129, 5, 0, 8, 1),
     (9, 32, 0, 1, 1023), (1, 2, 0, 1, 1), (0, 4, 3, 2, 2)],
)  # fmt: skip
def test_assignments_are_sorted_both_ways(rows, columns, first, block, blocks, once):
    experts = torch.randint(0, first + block * blocks + 3, (rows, columns))
    bins = torch.where(experts < first, blocks, ((experts - first) // block).clamp(max=blocks))
    if once:
        for row in bins:
            for k in reversed(range(columns)):
                row[k] = blocks if row[k] in row[:k] else row[k]
    order = bins.flatten().argsort(stable=True)
    found = sort_assignments(experts, first, block, blocks, once)
    counts = torch.bincount(bins.flatten(), minlength=blocks + 1)
    assert torch.equal(found.order_N, order)
    assert torch.equal(found.source_N, order // columns)
    assert torch.equal(found.by_row_N, (order // columns).argsort(stable=True))
    assert torch.equal(found.row_ends_S1, torch.arange(rows + 1) * columns)
    assert torch.equal(found.counts_B1, torch.cat([torch.zeros(1).long(), counts]))
    assert torch.equal(found.bin_ends_B, counts.cumsum(0).int())


def test_more_pieces_than_a_program_adds_up_at_a_time():
    numbers = torch.randint(3, (1030 * 128 + 5,))
    table = torch.stack([torch.bincount(p, minlength=4) for p in numbers.split(128)], 1).int()
    want = table.flatten().cumsum(0).view(4, -1) - table
    from router.kernels import triton_sorting

    totals = torch.bincount(numbers, minlength=3)
    pieces = table.shape[1]
    triton_sorting.starts_of_digits[(3,)](table, totals, pieces, None, SIZE=4, CHUNK=1024)
    assert torch.equal(table[:3], want[:3].int())
    assert router_kernels.MAX_BINS == 1 << 20
