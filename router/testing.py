"""Contracts of routings, balancing rules and capacity policies, as test classes.

Derive a class whose name begins with ``Test`` and set its attributes; pytest runs the rest::

    from router.testing import RoutingContract

    class TestMine(RoutingContract):
        fields = {"routing": "my_package.my_module:MyRouting"}

The routings, rules and policies of this repository pass the same classes. The tests need torch
alone.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor

from router.balancing import Balancing, RoutedTokens
from router.capacity import Assignments, CapacityPolicy, capacity_policy
from router.config import RouterConfig
from router.output import RouterOutput
from router.topk import TopKRouter

D, E, K = 12, 6, 2


def _router(fields: dict[str, Any]) -> TopKRouter:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of routings that are no good to train with
        router = TopKRouter(D, RouterConfig(**{"num_experts": E, "top_k": K, **fields}))
    with torch.no_grad():
        router.weight.mul_(30)
    return router


def _tokens(number: int) -> Tensor:
    return torch.randn(number, D, generator=torch.Generator().manual_seed(3))


class RoutingContract:
    """Of any routing, whatever the tokens."""

    fields: ClassVar[dict[str, Any]] = {}
    """Of RouterConfig: at least ``routing``."""

    def router(self) -> TopKRouter:
        """A router with this routing."""
        return _router(self.fields)

    def test_experts_are_distinct_and_in_range_and_weights_are_finite(self) -> None:
        """For no token, one and several, in training and in evaluation."""
        router = self.router()
        width = router.config.max_experts_per_token
        for training in (True, False):
            for T in (0, 1, 5, 24):
                out = router.train(training)(_tokens(T))
                self._check(out, T, width)

    def _check(self, out: RouterOutput, tokens: int, width: int) -> None:
        indices_TK, weights_TK = out.expert_indices_TK, out.expert_weights_TK
        assert indices_TK.shape == weights_TK.shape == (tokens, width)
        assert indices_TK.dtype == torch.int64
        assert weights_TK.dtype == torch.float32
        assert ((indices_TK >= 0) & (indices_TK <= E)).all(), "an expert that is not there"
        for row in indices_TK.tolist():
            experts = [e for e in row if e < E]
            assert len(set(experts)) == len(experts), "an expert twice for one token"
        assert weights_TK.isfinite().all()
        assert (weights_TK[indices_TK == E] == 0).all(), "no expert, and yet a weight"

    def test_equal_calls_have_equal_results(self) -> None:
        """A call leaves no state behind, and a deep copy routes as the original does."""
        router = self.router()
        first, again = router(_tokens(24)), router(_tokens(24))
        copied = copy.deepcopy(router)(_tokens(24))
        for out in (again, copied):
            assert torch.equal(first.expert_indices_TK, out.expert_indices_TK)
            assert torch.equal(first.expert_weights_TK, out.expert_weights_TK)

    def test_the_weights_and_the_losses_train_the_router(self) -> None:
        """Gradients are finite, also without tokens, and weights that vary have one."""
        for T in (0, 24):
            router = self.router()
            out = router(_tokens(T))
            (out.expert_weights_TK.square().sum() + out.aux_loss).backward()
            assert router.weight.grad is not None
            assert router.weight.grad.isfinite().all()
            assert T == 0 or router.weight.grad.any(), "nothing of the router is trained"

    def test_padding_changes_nothing_for_tokens(self) -> None:
        """In evaluation tokens are routed as in a batch without padding, whose values are NaN."""
        router = self.router().eval()
        mask_T = torch.arange(24) % 3 != 1
        x_TD = _tokens(24).masked_fill(~mask_T.unsqueeze(1), torch.nan)
        masked, plain = router(x_TD, token_mask_T=mask_T), router(x_TD[mask_T])
        assert (masked.expert_indices_TK[~mask_T] == E).all(), "padding has an expert"
        assert torch.equal(masked.expert_indices_TK[mask_T], plain.expert_indices_TK)
        torch.testing.assert_close(masked.expert_weights_TK[mask_T], plain.expert_weights_TK)
        only_padding = router(x_TD, token_mask_T=torch.zeros(24, dtype=torch.bool))
        assert not only_padding.rows_per_expert_E.any()

    def test_a_recorded_choice_is_replayed(self) -> None:
        """With the weights of the choice."""
        router = self.router()
        recorded = router(_tokens(24))
        again = router(_tokens(24), replay_indices_TK=recorded.topk_indices_TK)
        assert torch.equal(again.expert_indices_TK, recorded.expert_indices_TK)
        torch.testing.assert_close(again.expert_weights_TK, recorded.expert_weights_TK)

    def test_the_traits_say_what_is_so(self) -> None:
        """As rules between options and the converters rely on them."""
        router = self.router().eval()
        assert router.routing.traits == router.config.routing_traits
        out = router(_tokens(24))
        # Groups keep a token's best experts from the token, as they should.
        if router.config.routing_traits.top_k_in_evaluation and router.config.n_groups == 1:
            best_TK = out.logits_TE.topk(K, dim=1).indices.sort(1).values
            assert torch.equal(out.expert_indices_TK.sort(1).values, best_TK)
        if not router.config.routing_traits.experts_choose:
            assert (out.expert_indices_TK < E).all(), "a token has fewer than top_k experts"


class BalancingContract:
    """Of any balancing rule."""

    fields: ClassVar[dict[str, Any]] = {}
    """Of RouterConfig: at least ``balancing``."""

    def router(self) -> TopKRouter:
        """A router with this rule."""
        return _router(self.fields)

    def test_losses_are_finite_scalars_with_finite_gradients(self) -> None:
        """For no token, one and several."""
        for T in (0, 1, 24):
            router = self.router()
            out = router(_tokens(T), seq_len=T or None)
            for loss in (
                out.load_balance_loss, out.sequence_balance_loss, out.z_loss, out.aux_loss,
            ):  # fmt: skip
                assert loss.shape == ()
                assert loss.dtype == torch.float32
                assert loss.isfinite()
            assert T > 0 or out.aux_loss == 0, "a loss of no tokens"
            if out.aux_loss.requires_grad:
                out.aux_loss.backward()
                grad = router.weight.grad
                assert grad is None or grad.isfinite().all()

    def test_padding_is_in_no_loss(self) -> None:
        """Whatever its values, which may be NaN."""
        router = self.router()
        mask_T = torch.arange(24) < 17
        x_TD = _tokens(24).masked_fill(~mask_T.unsqueeze(1), torch.nan)
        masked = router(x_TD, token_mask_T=mask_T).aux_loss
        torch.testing.assert_close(masked, router(x_TD[mask_T]).aux_loss)

    def test_a_loss_leaves_its_arguments_as_they_are(self) -> None:
        """And equal calls have equal losses."""
        router, logits_TE = self.router(), _tokens(24)[:, :E].contiguous()
        counts_E = torch.arange(E)
        tokens = RoutedTokens(
            logits_TE, logits_TE.softmax(-1), logits_TE.topk(K).indices, counts_E, counts_E, None,
            None, None,
        )  # fmt: skip
        before = copy.deepcopy(tokens)
        first, again = router.balancing.losses(tokens), router.balancing.losses(tokens)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(
            torch.equal(a, b)
            for a, b in zip(tokens, before, strict=True)
            if isinstance(a, Tensor) and isinstance(b, Tensor)
        )

    def test_a_bias_never_moves_towards_the_load(self) -> None:
        """No bias moves where loads are equal; otherwise an expert that is below the mean does not
        fall, and one above does not rise. A rule that moves biases by margins may move all of them
        alike besides, on which no choice depends."""
        rule = self.router().balancing
        if rule.traits.margin_bins:
            self._check_margins(rule)
            return
        assert not rule.bias_change(torch.full((E,), 7)).any()
        assert not rule.bias_change(torch.zeros(E, dtype=torch.int64)).any()
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            counts_E = torch.randint(0, 1000, (E,), generator=generator)
            change_E = rule.bias_change(counts_E)
            assert change_E.shape == (E,)
            assert change_E.isfinite().all()
            above_E = counts_E * E > counts_E.sum()
            assert (change_E[above_E] <= 0).all()
            assert (change_E[~above_E] >= 0).all()

    def _check_margins(self, rule: Balancing) -> None:
        shape = (E, rule.traits.margin_bins)
        equal_TE = torch.eye(E) + torch.eye(E).roll(1, 1) / 2
        for balanced in (torch.zeros(shape).long(), rule.margins(equal_TE.repeat(4, 1), None)):
            change_E = rule.bias_change(balanced)
            assert (change_E == change_E[0]).all()
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            preferences_TE = torch.rand(97, E, generator=generator) + torch.arange(E) * 0.2
            tokens_T = torch.rand(97, generator=generator) < 0.7
            margins = rule.margins(preferences_TE, tokens_T)
            assert margins.shape == shape
            assert margins.dtype == torch.int64
            tokens = preferences_TE[tokens_T].tensor_split((5, 5))
            divided = torch.stack([rule.margins(some_TE, None) for some_TE in tokens]).sum(0)
            assert torch.equal(margins, divided), "margins depend on how tokens are divided"
            change_E = rule.bias_change(margins)
            assert change_E.shape == (E,)
            assert change_E.isfinite().all()
            chosen_TK = preferences_TE[tokens_T].topk(K, dim=1).indices
            above_E = chosen_TK.flatten().bincount(minlength=E) * E > chosen_TK.numel()
            assert change_E[above_E].max() <= change_E[~above_E].min()


def draw_choices(T: int, num_experts: int, top_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen experts [T, K], the values of the choice and scores [T, E]: few distinct scores, so
    that ties are common, and some experts out of reach."""
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.randint(1, 4, (T, num_experts), generator=generator).float() / 4
    choice_TE = scores_TE + torch.rand(T, num_experts, generator=generator)
    order = choice_TE.argsort(1, descending=True)
    out_of_reach = torch.rand(T, num_experts, generator=generator) < 0.3
    out_of_reach.scatter_(1, order[:, :top_k], False)
    choice_TE = choice_TE.masked_fill(out_of_reach, -math.inf)
    return choice_TE.topk(top_k, dim=1).indices, choice_TE, scores_TE


class CapacityPolicyContract:
    """Of any capacity policy, whatever is asked of it."""

    fields: ClassVar[dict[str, Any]] = {}
    """Of RouterConfig: at least ``capacity``."""
    reroutes: ClassVar[bool] = True
    """Whether the policy may move an assignment to another expert."""

    def policy(self) -> CapacityPolicy:
        """The policy, for E experts and K choices."""
        config = RouterConfig(**{"num_experts": E, "top_k": K, **self.fields})
        return capacity_policy(config.capacity, num_experts=E, top_k=K)

    def test_placements_keep_to_the_capacity_and_to_the_reach(self) -> None:
        """An expert is in reach, at most once for a token, and takes no more than it may."""
        for T in (0, 1, 5, 14):
            for seed in range(12):
                self._check(T, seed)

    def _check(self, tokens: int, seed: int) -> None:
        chosen_TK, choice_TE, scores_TE = draw_choices(tokens, E, K, seed)
        policy = self.policy()
        placed = policy.placed(Assignments(chosen_TK, choice_TE, scores_TE))
        again = policy.placed(Assignments(chosen_TK, choice_TE, scores_TE))
        assert torch.equal(placed.expert_indices_TK, again.expert_indices_TK)
        dropped_TK = placed.dropped_TK
        if dropped_TK is None:
            dropped_TK = torch.zeros_like(chosen_TK, dtype=torch.bool)
        moved_TK = (placed.expert_indices_TK != chosen_TK) & ~dropped_TK
        assert int(placed.num_rerouted) == int(moved_TK.sum())
        assert self.reroutes or not moved_TK.any()
        kept_TK = placed.expert_indices_TK.masked_fill(dropped_TK, E)
        loads = [int((kept_TK == e).sum()) for e in range(E)]
        for row, reach in zip(kept_TK.tolist(), choice_TE.tolist(), strict=True):
            experts = [e for e in row if e < E]
            assert len(set(experts)) == len(experts), "an expert twice for one token"
            assert all(reach[e] > -math.inf for e in experts), "an expert out of reach"
        for limits in map(policy.max_assignments_per_expert, (tokens, tokens + 5)):
            assert limits is None or all(n <= m for n, m in zip(loads, limits, strict=True))

    def test_where_the_load_is_equal_nothing_changes(self) -> None:
        """Every expert is chosen by as many tokens as any other."""
        scores_TE = torch.eye(E).repeat(4, 1) + torch.eye(E).roll(1, 1).repeat(4, 1) / 2
        chosen_TK = scores_TE.topk(K, dim=1).indices
        placed = self.policy().placed(Assignments(chosen_TK, scores_TE, scores_TE))
        assert torch.equal(placed.expert_indices_TK, chosen_TK)
        assert placed.dropped_TK is None or not placed.dropped_TK.any()

    def test_padding_takes_no_capacity(self) -> None:
        """Rows without an expert change nothing for the others."""
        chosen_TK, choice_TE, scores_TE = draw_choices(12, E, K, 1)
        is_padding_T1 = (torch.arange(12) % 3 == 1).unsqueeze(1)
        tokens_T = ~is_padding_T1.squeeze(1)
        padded = self.policy().placed(
            Assignments(
                chosen_TK.masked_fill(is_padding_T1, E), choice_TE, scores_TE, True, tokens_T.sum()
            )
        )
        plain = self.policy().placed(
            Assignments(chosen_TK[tokens_T], choice_TE[tokens_T], scores_TE[tokens_T])
        )
        assert torch.equal(padded.expert_indices_TK[tokens_T], plain.expert_indices_TK)
        if padded.dropped_TK is not None and plain.dropped_TK is not None:
            assert torch.equal(padded.dropped_TK[tokens_T], plain.dropped_TK)

    def test_a_policy_without_bounds_says_so(self) -> None:
        """``bounded = False`` is a promise that nothing is moved or dropped."""
        config = RouterConfig(**{"num_experts": E, "top_k": K, **self.fields})
        if config.capacity.traits.bounded:
            return
        chosen_TK, choice_TE, scores_TE = draw_choices(14, E, K, 0)
        placed = self.policy().placed(Assignments(chosen_TK, choice_TE, scores_TE))
        assert torch.equal(placed.expert_indices_TK, chosen_TK)
        assert placed.dropped_TK is None
        assert self.policy().max_assignments_per_expert(14) is None
