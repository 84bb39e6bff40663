"""Routing against literal, slow oracles: scores, choices, losses and biases.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import MoEConfig, MoELayer
from router import RouterConfig, TopKRouter
from router.losses import sequence_balance_loss
from router.routing_sinkhorn import sinkhorn
from router.routing_top_k import limit_to_groups
from router.scores import score

T, D, E = 24, 12, 8


def make_router(seed: int = 0, **fields: object) -> TopKRouter:
    torch.manual_seed(seed)
    router = TopKRouter(D, RouterConfig(**{"num_experts": E, "top_k": 3, **fields}))
    with torch.no_grad():
        router.weight.mul_(30)
        if router.bias is not None:
            router.bias.normal_()
    return router


def literal(router: TopKRouter, x: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Choices and weights of every token, in Python floats (float64)."""
    c = router.config
    weight = router.weight.detach().double()
    bias = [0.0] * E if router.expert_bias is None else router.expert_bias.tolist()
    all_chosen, all_weights = [], []
    for token in x.double():
        logits = [float(token @ row) for row in weight]
        if router.bias is not None:
            logits = [z + b for z, b in zip(logits, router.bias.tolist(), strict=True)]
        total = sum(math.exp(z) for z in logits)
        if c.score_func == "softmax":
            scores = [math.exp(z) / total for z in logits]
        elif c.score_func == "sqrtsoftplus":
            scores = [math.sqrt(math.log1p(math.exp(z))) for z in logits]
        else:
            scores = [1 / (1 + math.exp(-z)) for z in logits]
        choice = [s + b for s, b in zip(scores, bias, strict=True)]
        size = E // c.n_groups
        groups = [choice[g * size : (g + 1) * size] for g in range(c.n_groups)]
        group_scores = [sum(sorted(g, reverse=True)[: c.topk_per_group]) for g in groups]
        best = sorted(range(c.n_groups), key=lambda g: -group_scores[g])[: c.topk_groups]
        allowed = [e for e in range(E) if c.n_groups == 1 or e // size in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: c.top_k]
        if c.softmax_after_topk:
            exps = [math.exp(logits[e]) for e in chosen]
            weights = [v / sum(exps) for v in exps]
        else:
            weights = [scores[e] for e in chosen]
            if c.norm_topk_prob:
                weights = [w / sum(weights) for w in weights]
        all_chosen.append(chosen)
        all_weights.append([w * c.route_scale for w in weights])
    return all_chosen, all_weights


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_topk_prob": False},
        {"score_func": "sigmoid"},
        {"score_func": "sqrtsoftplus", "expert_bias": True, "route_scale": 1.5},
        {"router_bias": True, "softmax_after_topk": True},
        {"router_bias": True, "score_func": "sigmoid", "n_groups": 4, "topk_groups": 2},
        {"score_func": "sigmoid", "norm_topk_prob": False, "route_scale": 2.5},
        {"softmax_after_topk": True},
        {"top_k": 1, "norm_topk_prob": False},
        {"n_groups": 4, "topk_groups": 2},
        {"n_groups": 2, "topk_groups": 1, "topk_per_group": 4},
        {"n_groups": 4, "topk_groups": 2, "score_func": "sigmoid", "expert_bias": True,
         "route_scale": 2.5},
        {"score_func": "softmax", "expert_bias": True},
        {"softmax_after_topk": True, "expert_bias": True},
    ],
    ids=str,
)  # fmt: skip
def test_choices_and_weights_are_the_literal_ones(fields):
    router = make_router(**fields)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(E) * 0.3)
    x = torch.randn(T, D)
    out = router(x)
    chosen, weights = literal(router, x)
    assert out.expert_indices_TK.tolist() == chosen
    torch.testing.assert_close(out.expert_weights_TK, torch.tensor(weights), rtol=1e-4, atol=1e-6)
    counts = [sum(e in row for row in chosen) for e in range(E)]
    assert out.tokens_per_expert_E.tolist() == counts


def test_the_bias_moves_choices_and_nothing_else():
    plain, biased = make_router(), make_router(expert_bias=True)
    x = torch.randn(T, D)
    assert torch.equal(biased(x).expert_indices_TK, plain(x).expert_indices_TK)
    biased.expert_bias[5] = 10.0
    out = biased(x)
    assert (out.expert_indices_TK[:, 0] == 5).all()
    scores = torch.nn.functional.linear(x, biased.weight).softmax(-1)
    expected = scores.gather(1, out.expert_indices_TK)
    torch.testing.assert_close(
        out.expert_weights_TK, expected / expected.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7
    )
    out.expert_weights_TK.square().sum().backward()
    assert biased.expert_bias.grad is None
    assert not biased.expert_bias.requires_grad


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**12), min_size=E, max_size=E))
def test_a_step_moves_each_bias_towards_the_mean(counts):
    router = make_router(expert_bias=True, bias_update_rate=0.25)
    router.update_bias(torch.tensor(counts))
    mean = sum(counts) / E
    expected = [0.25 * ((mean > n) - (mean < n)) for n in counts]
    assert router.expert_bias.tolist() == expected
    assert list(router.state_dict()) == ["weight", "expert_bias"]


def test_biases_balance_a_router_that_loads_one_expert():
    router = make_router(expert_bias=True, bias_update_rate=0.005, score_func="sigmoid")
    x = torch.randn(512, D) + 1.0
    first = router(x).tokens_per_expert_E
    for _ in range(400):
        router.update_bias(router(x).tokens_per_expert_E)
    last = router(x).tokens_per_expert_E
    assert first.max() / first.float().mean() > 1.5
    assert last.max() / last.float().mean() < 1.15


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_sequence_loss_is_the_mean_of_each_sequences_own(top_k):
    torch.manual_seed(0)
    probs = torch.randn(24, E).softmax(-1).requires_grad_()
    indices = probs.detach().topk(top_k, dim=-1).indices
    expected = 0.0
    for b in range(4):
        rows = range(b * 6, b * 6 + 6)
        for e in range(E):
            count = sum(int((indices[t] == e).sum()) for t in rows)
            f = E / (top_k * 6) * count  # eq. 18
            p = sum(probs[t, e] for t in rows) / 6  # eq. 20
            expected = expected + f * p / 4  # eq. 17, averaged over sequences
    actual = sequence_balance_loss(probs, indices, 6)
    torch.testing.assert_close(actual, expected)
    (grad,) = torch.autograd.grad(actual, probs)
    (expected_grad,) = torch.autograd.grad(expected, probs)
    torch.testing.assert_close(grad, expected_grad)
    assert grad.abs().sum() > 0
    assert sequence_balance_loss(probs[:0], indices[:0], 6) == 0
    assert sequence_balance_loss(probs[:0], indices[:0], None) == 0


@pytest.mark.parametrize(
    "weights",
    [{"aux_loss_coeff": 1.0}, {"seq_aux_loss_coeff": 1.0}, {"z_loss_coeff": 1.0}],
    ids=str,
)
def test_each_loss_reaches_the_router_once_under_recomputation(weights):
    zero = {"aux_loss_coeff": 0.0, **weights}
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=D, d_ff=16, num_experts=E, top_k=2, **zero))
    x = torch.randn(3, 7, D)
    loss = layer(x).aux.aux_loss
    loss.backward()
    expected = layer.router.weight.grad.clone()
    assert expected.abs().sum() > 0
    layer.zero_grad()
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).aux.aux_loss
    again.backward()
    assert torch.equal(again, loss)
    assert torch.equal(layer.router.weight.grad, expected)


def test_a_sequence_is_the_dim_before_the_last():
    torch.manual_seed(0)
    config = {"d_model": D, "d_ff": 16, "num_experts": E, "top_k": 2}
    layer = MoELayer(MoEConfig(**config, seq_aux_loss_coeff=1.0))
    x = torch.randn(3, 7, D)
    whole = layer(x).aux.sequence_balance_loss
    each = torch.stack([layer(row).aux.sequence_balance_loss for row in x])
    torch.testing.assert_close(whole, each.mean())
    assert MoELayer(MoEConfig(**config))(x).aux.sequence_balance_loss == 0


def test_groups_leave_only_the_best_ones_in_reach():
    scores = torch.tensor([[9.0, 0.0, 5.0, 5.0, 6.0, 1.0, 0.0, 0.0]])
    limited = limit_to_groups(scores, 4, 2, 2)
    inf = -math.inf
    assert limited.tolist() == [[inf if e in (4, 5, 6, 7) else scores[0, e] for e in range(8)]]
    limited = limit_to_groups(scores, 4, 2, 1)
    assert limited.tolist() == [[inf if e in (2, 3, 6, 7) else scores[0, e] for e in range(8)]]


def test_sinkhorn_balances_tokens_and_experts():
    torch.manual_seed(0)
    logits = torch.randn(64, E) * 2 + torch.arange(E)
    plan = sinkhorn(logits, iterations=50)
    torch.testing.assert_close(plan.sum(1), torch.full((64,), 1 / 64))
    torch.testing.assert_close(plan.sum(0), torch.full((E,), 1 / E), rtol=1e-3, atol=1e-4)
    router = make_router(routing="sinkhorn", top_k=2)
    x = torch.randn(256, D) + 1.0
    balanced = router(x).tokens_per_expert_E
    router.eval()
    plain = router(x).tokens_per_expert_E
    assert balanced.max() < 0.75 * plain.max()
    assert sinkhorn(torch.empty(0, E)).shape == (0, E)
    assert torch.isfinite(sinkhorn(torch.tensor([[1000.0, -1000.0], [0.0, 0.0]]))).all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
def test_sinkhorn_against_plain_float64(tokens):
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, E) * 3
    plan = logits.double().exp()
    for _ in range(8 if tokens > 1 else 0):
        plan = plan / plan.sum(0, keepdim=True)
        plan = plan / plan.sum(1, keepdim=True)
    plan = plan / plan.sum(1, keepdim=True) / tokens
    torch.testing.assert_close(sinkhorn(logits).double(), plan, rtol=1e-5, atol=1e-8)


def test_sinkhorn_of_one_token_follows_its_logits():
    router = make_router(routing="sinkhorn", top_k=2)
    assert router.training
    for token in torch.randn(20, 1, D) * torch.tensor([1.0, 40.0]).repeat(10)[:, None, None]:
        chosen = router(token).expert_indices_TK
        assert torch.equal(chosen, torch.nn.functional.linear(token, router.weight).topk(2).indices)


@pytest.mark.parametrize("shift", [-1000.0, -95.0, -50.0, -40.0, 0.0, 60.0])
def test_probabilities_of_sigmoid_scores_sum_to_one_for_any_logits(shift):
    torch.manual_seed(0)
    logits = (torch.randn(16, E) * 4 + shift).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    scores, probs = score(logits, "sigmoid")
    wanted = torch.nn.functional.logsigmoid(exact).softmax(-1)
    torch.testing.assert_close(probs.sum(-1), torch.ones(16), rtol=1e-5, atol=0)
    torch.testing.assert_close(probs.double(), wanted, rtol=1e-4, atol=1e-7)
    mix = torch.randn(16, E)
    (probs * mix).sum().backward()
    (wanted * mix).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    if shift > -41:  # the bits of a plain quotient
        assert torch.equal(probs, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("coeff", ["aux_loss_coeff", "seq_aux_loss_coeff"])
def test_the_losses_of_low_sigmoid_scores_are_at_least_those_of_balance(coeff):
    layer = MoELayer(
        MoEConfig(d_model=D, d_ff=16, num_experts=E, top_k=2, score_func="sigmoid",
                  **{"aux_loss_coeff": 0.0, coeff: 1.0})
    )  # fmt: skip
    with torch.no_grad():
        layer.router.weight.fill_(-5.0).add_(0.2 * torch.randn(E, 1))  # sigmoids of 1e-26
    aux = layer(torch.rand(6, D) + 0.5).aux
    assert (
        aux.aux_loss > 1.0
    )  # all tokens choose the same experts; 1 is balance, 0 was an underflow
    aux.aux_loss.backward()
    assert layer.router.weight.grad.abs().sum() > 0


def steps(router: TopKRouter, number: int, **then: object) -> None:
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    for _ in range(number):
        out = [router(torch.randn(T, D)) for _ in range(5)][-1]  # five micro-batches
        out.expert_weights_TK.square().sum().backward()
        optimizer.step()
        for name, values in then.items():
            getattr(router, name)(values)


def test_a_bias_that_nobody_moves_warns_once():
    counts = torch.arange(E)
    router = make_router(expert_bias=True)
    steps(router, 3)
    with pytest.warns(UserWarning, match=r"expert_bias \(true\) has no effect, after 3 opt") as w:
        steps(router, 9)
    assert len(w) == 1
    steps(make_router(), 9)
    steps(make_router(expert_bias=True, bias_update_rate=0.0), 9)
    steps(make_router(expert_bias=True), 9, update_bias=counts)
    with torch.no_grad():
        steps_without = make_router(expert_bias=True)
        for _ in range(9):
            steps_without.weight.mul_(2)
            steps_without(torch.randn(T, D))


def test_the_loss_of_the_step_before_is_one_loss_however_the_step_is_cut():
    router = make_router(aux_loss_scope="previous_step").double()
    x = torch.randn(24, D).double()
    first = router(x)
    torch.testing.assert_close(first.load_balance_loss, torch.ones((), dtype=torch.float64))
    assert first.expert_counts_E.tolist() == [1] * E
    counts = torch.arange(E)
    router.set_step_counts(counts)
    whole = router(x).load_balance_loss
    probs = torch.nn.functional.linear(x.double(), router.weight.double()).softmax(-1)
    expected = E * sum(float(c) / 28 * probs[:, e].mean() for e, c in enumerate(counts))
    torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=0)
    prior = None
    parts = []
    for part in x.split([1, 5, 18]):
        out = router(part, prior_expert_counts_E=prior)
        assert out.expert_counts_E.tolist() == counts.tolist()
        prior = out.expert_counts_E
        parts.append(len(part) / 24 * out.load_balance_loss)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)
    assert router.state_dict().keys() == {"weight"}

    # The scope of the step so far does not promise it, as the documentation says.
    x = x.float()
    router, prior, parts = make_router(aux_loss_scope="global_batch"), None, []
    for part in x.split([1, 5, 18]):
        out = router(part, prior_expert_counts_E=prior)
        prior = out.expert_counts_E
        parts.append(len(part) / 24 * out.load_balance_loss)
    assert abs(sum(parts) - router(x).load_balance_loss) > 1e-3


def test_counts_of_the_step_before_that_nobody_sets_warn_once():
    router = make_router(aux_loss_scope="previous_step")
    with pytest.warns(
        UserWarning, match=r"aux_loss_scope \(previous_step\) has no effect, aft"
    ) as w:
        steps(router, 9)
    assert len(w) == 1
    steps(make_router(aux_loss_scope="previous_step", aux_loss_coeff=0.0), 9)
    steps(make_router(aux_loss_scope="previous_step"), 9, set_step_counts=torch.arange(E))
    with pytest.raises(ValueError, match=r"aux_loss_scope \(micro_batch\) must be previous_step"):
        make_router().set_step_counts(torch.arange(E))
    with pytest.raises(ValueError, match=r"tokens_per_expert_E \(\[1\]\) must be \[8\]"):
        router.set_step_counts(torch.zeros(1))


def test_forced_balance_says_so_and_is_even():
    with pytest.warns(UserWarning, match="force_load_balance: tokens go to experts in turn"):
        router = make_router(routing="force_load_balance")
    out = router(torch.randn(T, D))
    assert out.tokens_per_expert_E.tolist() == [T * 3 // E] * E
    assert all(len(set(row)) == 3 for row in out.expert_indices_TK.tolist())
    assert out.expert_weights_TK.requires_grad


def test_recorded_choices_are_replayed():
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=D, d_ff=16, num_experts=E, top_k=2))
    x = torch.randn(2, 5, D)
    recorded = layer.router(x.view(10, D)).expert_indices_TK
    with torch.no_grad():
        layer.router.weight.add_(torch.randn_like(layer.router.weight) * 0.01)
    replayed = layer(x, replay_indices_TK=recorded)
    other = layer(x, replay_indices_TK=recorded.roll(1, 0))
    assert torch.equal(
        replayed.aux.tokens_per_expert_E, torch.bincount(recorded.flatten(), minlength=E)
    )
    assert not torch.equal(replayed.hidden, other.hidden)
    replayed.hidden.sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0


def test_jitter_is_for_training_and_of_its_size():
    router = make_router(input_jitter=0.01)
    x = torch.randn(200, D)
    weights = [router(x).expert_weights_TK for _ in range(2)]
    assert not torch.equal(*weights)
    router.eval()
    weights = [router(x).expert_weights_TK for _ in range(2)]
    assert torch.equal(*weights)


def test_entropy_is_of_the_probabilities():
    router = make_router()
    x = torch.randn(T, D)
    probs = torch.nn.functional.linear(x, router.weight).softmax(-1)
    expected = torch.distributions.Categorical(probs=probs).entropy().mean()
    torch.testing.assert_close(router(x).entropy, expected.detach())
    assert not router(x).entropy.requires_grad
    with torch.no_grad():
        router.weight.zero_()
    assert float(router(x).entropy) == pytest.approx(math.log(E))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_keeps_its_dtype_whatever_the_models(dtype):
    router = make_router().to(dtype)
    x = torch.randn(T, D).to(dtype)
    out = router(x)
    expected = torch.nn.functional.linear(x.float(), router.weight.float()).softmax(-1)
    assert out.expert_weights_TK.dtype == torch.float32
    assert torch.equal(out.expert_indices_TK, expected.topk(3).indices)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, r"top_k \(9\) must be at most num_experts \(8\)"),
        ({"n_groups": 3}, r"num_experts \(8\) must be a multiple of n_groups \(3\)"),
        ({"n_groups": 2, "topk_groups": 3}, r"topk_groups \(3\) must be at most n_groups"),
        ({"n_groups": 8, "topk_groups": 4}, r"topk_per_group \(2\) must be at most .* = 1\)"),
        ({"n_groups": 4}, r"top_k \(3\) must be at most the experts of topk_groups \(1 x"),
        ({"top_k": 1}, r"norm_topk_prob \(true\) must be false with top_k \(1\)"),
        ({"softmax_after_topk": True, "score_func": "sigmoid"}, r"softmax_after_topk"),
        ({"bias_update_rate": 0.01}, r"expert_bias \(false\) must be true with bias_upd"),
        ({"routing": "sinkhorn", "expert_bias": True}, r"routing \(sinkhorn\) must be"),
        ({"route_scale": 0.0}, "route_scale"),
        ({"routing": "best"}, "routing"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**{"num_experts": E, "top_k": 3, **fields})


def literal_expert_choice(scores: list[list[float]], takes: int) -> list[set[int]]:
    """The experts of every token, where each expert takes its best tokens."""
    T = len(scores)
    experts: list[set[int]] = [set() for _ in range(T)]
    for e in range(len(scores[0])):
        for t in sorted(range(T), key=lambda t: (-scores[t][e], t))[:takes]:
            experts[t].add(e)
    return experts


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("tokens", [24, 3, 1, 0])
def test_experts_choose_their_best_tokens(norm_topk_prob, tokens):
    torch.manual_seed(0)
    layer = MoELayer(
        MoEConfig(d_model=D, d_ff=16, num_experts=E, top_k=3, routing="expert_choice",
                  norm_topk_prob=norm_topk_prob)
    )  # fmt: skip
    with torch.no_grad():
        layer.router.weight.mul_(30)
    x = torch.randn(tokens, D, requires_grad=True)
    out, takes = layer.router(x), min(-(-tokens * 3 // E), tokens)
    scores = (x @ layer.router.weight.T).softmax(-1)
    expected = literal_expert_choice(scores.tolist(), takes) if tokens else []
    y = torch.zeros(tokens, D)
    for t, experts in enumerate(expected):
        assert {e for e in out.expert_indices_TK[t].tolist() if e < E} == experts
        total = sum(float(scores[t, e].detach()) for e in experts) if norm_topk_prob else 1.0
        for e in experts:
            weight = float(scores[t, e].detach()) / total
            assert float(out.expert_weights_TK[t, e].detach()) == pytest.approx(weight, rel=1e-4)
            w = layer.experts
            h = torch.nn.functional.silu(x[t] @ w.w_gate[e]) * (x[t] @ w.w_up[e])
            y[t] = y[t] + weight * (h @ w.w_down[e]).detach()
    assert out.tokens_per_expert_E.tolist() == out.rows_per_expert_E.tolist() == [takes] * E
    hidden, aux = layer(x)
    torch.testing.assert_close(hidden.detach(), y, rtol=1e-4, atol=1e-5)
    assert aux.num_dropped == 0
    hidden.square().sum().backward()
    assert tokens == 0 or layer.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("routing", ["top_k", "expert_choice"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_counted_and_never_routed_in_silence(
    score_func, routing, bad
):
    torch.manual_seed(0)
    layer = MoELayer(
        MoEConfig(d_model=D, d_ff=16, num_experts=E, top_k=3, score_func=score_func,
                  routing=routing)
    )  # fmt: skip
    x = torch.randn(6, D)
    x[2, 0] = bad
    with torch.no_grad():
        layer.router.weight[:, 0] = 0.0
        layer.router.weight[4, 0] = 1.0  # one expert's logit alone: 0 · inf is NaN for the others
    out = layer(x)
    assert out.aux.num_nonfinite_tokens == 1
    routed = layer.router(x)
    assert routed.nonfinite_T.tolist() == [False, False, True, False, False, False]
    used = routed.expert_indices_TK[2] < E
    assert routed.expert_weights_TK[2][used].isnan().all()
    others = torch.ones(6, dtype=torch.bool)
    others[2] = False
    assert routed.expert_weights_TK[others].isfinite().all()
    assert out.hidden[2].isnan().all()
    assert out.hidden[others].isfinite().all()
    assert layer(torch.randn(6, D)).aux.num_nonfinite_tokens == 0


def test_one_infinite_logit_is_enough():
    router = make_router(score_func="sigmoid", norm_topk_prob=False)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[4, 0] = 3e38
    x = torch.zeros(2, D)
    x[1, 0] = 100.0  # the logit of expert 4 is infinite, and its sigmoid 1
    out = router(x)
    assert out.num_nonfinite_tokens == 1
    assert out.expert_weights_TK[1].isnan().all()
    assert out.expert_weights_TK[0].isfinite().all()


@pytest.mark.parametrize(
    "fields",
    [{"routing": "sinkhorn"}, {"capacity": {"policy": "fixed", "capacity_factor": 0.5}}],
    ids=str,
)
def test_a_token_that_is_not_finite_moves_no_other(fields):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=D, d_ff=16, num_experts=E, top_k=3, **fields))
    with torch.no_grad():
        layer.router.weight.mul_(30)
    x = torch.randn(8, D)
    x[5] = 0  # what a bad token's logits count as in the choice
    sound = layer.router(x)
    x[5, 0] = math.nan
    routed = layer.router(x)
    others = torch.arange(8) != 5
    if "capacity" not in fields:
        assert torch.equal(routed.expert_indices_TK[others], sound.expert_indices_TK[others])
    else:
        kept = (routed.expert_indices_TK[others] < E).sum()
        assert kept >= (sound.expert_indices_TK[others] < E).sum(), "it takes nobody's room"
    hidden = layer(x).hidden
    assert hidden[5].isnan().all()
    assert hidden[others].isfinite().all()


@pytest.mark.parametrize(
    "fields",
    [
        {"capacity": {"policy": "fixed", "capacity_factor": 0.5}},
        {"capacity": {"policy": "fixed", "capacity_factor": 0.5, "drop_policy": "probs"}},
        {"capacity": {"policy": "fixed", "capacity_factor": 0.5, "drop_policy": "position"}},
        {"capacity": {"policy": "fixed", "capacity_factor": 0.5}, "softmax_after_topk": True},
        {"capacity": {"max_tokens_per_rank": 11}},
        {"routing": "expert_choice"},
        {"score_func": "sigmoid", "expert_bias": True, "n_groups": 2},
    ],
)
def test_a_replay_has_the_weights_and_drops_of_what_was_recorded(fields):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=D, d_ff=16, num_experts=E, top_k=2, **fields))
    x = torch.randn(T, D)
    first = layer.router(x)
    if "policy" in fields.get("capacity", {}):
        assert (first.topk_indices_TK < 0).any()
    again = layer.router(x, replay_indices_TK=first.topk_indices_TK)
    for name in ("expert_indices_TK", "expert_weights_TK", "topk_indices_TK", "rows_per_expert_E"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    hidden, aux = layer(x)
    replayed = layer(x, aux.topk_indices_TK)
    assert torch.equal(replayed.hidden, hidden)
    assert replayed.aux.num_dropped == aux.num_dropped
    assert replayed.aux.num_rerouted == 0


@pytest.mark.parametrize("fields", [{}, {"softmax_after_topk": True}, {"score_func": "sigmoid"}])
def test_no_choice_has_no_part_in_the_weights(fields):
    router = make_router(**fields)
    x = torch.randn(T, D)
    recorded = router(x).topk_indices_TK.clone()
    recorded[3, 1:] = E
    recorded[4] = E
    out = router(x, replay_indices_TK=recorded)
    weights = out.expert_weights_TK.detach()
    assert weights[3].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert (weights[4] == 0).all()
    assert int(out.rows_per_expert_E.sum()) == int((recorded < E).sum())
    (out.expert_weights_TK * torch.arange(3)).sum().backward()
    assert router.weight.grad.isfinite().all()
    with torch.no_grad():
        router.weight[-1] += 3
    theirs = (recorded != E - 1).all(1)
    if fields != {"score_func": "sigmoid"}:
        again = router(x, replay_indices_TK=recorded).expert_weights_TK.detach()
        assert torch.allclose(again[theirs], weights[theirs]), "an expert nobody chose matters"


def test_records_that_do_not_fit_are_refused():
    router, x = make_router(), torch.randn(T, D)
    record = router(x).topk_indices_TK
    for bad in (record[:, :1], record[1:], record.int()):
        with pytest.raises(ValueError, match=r"replay_indices_TK \(.*\) must be \["):
            router(x, replay_indices_TK=bad)
    for value in (E + 1, -E - 1):
        bad = record.clone()
        bad[2, 0] = value
        with pytest.raises(ValueError, match=rf"replay_indices_TK \(.*{value}.*\) must be below"):
            router(x, replay_indices_TK=bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_stay_exact_in_a_model_of_another_dtype(dtype):
    router = make_router(expert_bias=True, bias_update_rate=0.001).to(dtype)
    assert router.weight.dtype == torch.float32
    counts = torch.zeros(E, dtype=torch.int64)
    counts[0] = 8
    for _ in range(700):
        router.update_bias(counts)
    assert router.expert_bias.dtype == torch.float32
    assert router.expert_bias[0] == pytest.approx(-0.7, rel=1e-4)
    assert router.expert_bias[1] == pytest.approx(0.7, rel=1e-4)
    router.to("meta")
    assert router.expert_bias.device.type == "meta"


def test_biases_are_moved_by_a_count_for_each_expert():
    with pytest.raises(ValueError, match="expert_bias"):
        make_router().update_bias(torch.zeros(E))
    with pytest.raises(ValueError, match=r"tokens_per_expert_E \(\[1\]\) must be"):
        make_router(expert_bias=True).update_bias(torch.zeros(1))
