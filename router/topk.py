"""The router: scores of all experts for each token, and the experts that each token takes.

Legend: T tokens, D d_model, E experts, K top_k, M bins of margins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from router import kernels
from router.autocast import no_autocast
from router.balancing import RoutedTokens, balance_by_kernel, balancing_of
from router.capacity import Assignments, capacity_policy
from router.capacity_dropless import Dropless
from router.checks import check_counts, check_counts_of_step, check_mask, check_replay
from router.config import RouterConfig
from router.few_rows import with_enough_rows
from router.groups import HoldsGroups, LostGroup
from router.kept_choices import Choice, KeptChoices
from router.losses import mean_over_tokens
from router.micro_batch import Places, SharedMicroBatch, whole_micro_batch
from router.output import RouterOutput, own_part, routed_with_padding
from router.padding import token_rows_of
from router.routing import Scored, routing_of
from router.routing_top_k import TopK
from router.scores import TINY, count_tokens_per_expert, score
from router.unused import UnusedUpdate
from router.wide_linear import keep_wide, wide_linear


class TopKRouter(HoldsGroups, nn.Module):
    """A linear map to one logit per expert, a score function, and a choice of top_k experts.

    The map, the scores and the losses are in float32, or in the input's dtype if that is wider,
    whatever the model's dtype, and under autocast too. In bfloat16 the logits of similar experts
    would tie, and the choice among them would be arbitrary.
    """

    GROUPS = ("balance_group", "token_group")
    kept_choices: KeptChoices | None = None
    """Where calls keep their choices, or take them from; see :meth:`keeping_choices`."""
    bias: Tensor | None
    expert_bias: Tensor | None

    def __init__(self, d_model: int, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.routing = routing_of(config)
        self.balancing = balancing_of(config)
        self.capacity = capacity_policy(
            config.capacity, num_experts=config.num_experts, top_k=config.top_k
        )
        self.balance_group: dist.ProcessGroup | None = None
        """The ranks whose tokens the load-balancing loss counts together."""
        self.token_group: dist.ProcessGroup | None = None
        """The ranks that have parts of the same sequences, and therefore of one micro-batch."""
        self.micro_batch: SharedMicroBatch | None = None
        """The ranks that have parts of the same sequences, where numbers must be those of one
        rank: each of them then routes the whole micro-batch, and takes its own tokens' part."""
        self.exact = False
        """Numbers must be those of plain operations, bit for bit: no kernel computes them."""
        self.weight = nn.Parameter(torch.empty(config.num_experts, d_model))
        logit_bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        self.register_parameter("bias", logit_bias)
        self.lora: nn.Module | None = None
        """An adapter: a module that gives the weight to compute with, [E, D] -> [E, D]."""
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self._bins = config.balancing_traits.margin_bins
        self.step_counts_E: Tensor | None = None
        """[E] int64: what the load-balancing loss of the scope ``previous_step`` counts; see
        :meth:`set_step_counts`. Not part of the state dict."""
        self._idle = UnusedUpdate(
            "expert_bias (true)",
            "update_bias(margins_EM)" if self._bins else "update_bias(tokens_per_expert_E)",
            ", or set bias_update_rate (0) to keep the biases as they are",
        )
        self._idle_counts = UnusedUpdate(
            "aux_loss_scope (previous_step)", "set_step_counts(tokens_per_expert_E)"
        )
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the weight in float32 or wider, and biases in float32, whatever dtype the
        model is cast to. In bfloat16 a step of 1e-3 would be lost on a bias of 0.5, and a small
        step of the optimizer on a weight."""

        before = self.expert_bias
        super()._apply(keep_wide(fn), recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = before.to(after.device)
        return self

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """Count the load-balancing loss over ``group``, unless ``balance_group`` is set, and let
        the capacity policy know the group."""
        self.capacity.use_expert_group(group)
        if self.balance_group is None or isinstance(self.balance_group, LostGroup):
            self.balance_group = group

    def use_token_group(self, group: dist.ProcessGroup) -> None:
        """Set the ranks over which sequences are spread; ``parallel.apply_context_parallel`` calls
        this method."""
        self.token_group = group

    def use_micro_batch(self, shared: SharedMicroBatch | None) -> None:
        """Set the ranks over which sequences are spread, where numbers must be those of one rank;
        ``parallel.apply.apply_exact_context`` calls this method. None where this rank has the
        sequences whole."""
        self.micro_batch = shared

    def extra_repr(self) -> str:
        """The fields that ``print`` shows."""
        c = self.config
        return f"d_model={self.weight.shape[1]}, num_experts={c.num_experts}, top_k={c.top_k}"

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02, for nearly uniform initial scores; biases zeros."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def forward(
        self,
        x_TD: Tensor,
        seq_len: int | None = None,
        replay_indices_TK: Tensor | None = None,
        prior_expert_counts_E: Tensor | None = None,
        token_mask_T: Tensor | None = None,
    ) -> RouterOutput:
        """Route [T, D] tokens; T may be 0.

        Args:
            x_TD: the tokens, sequence after sequence.
            seq_len: tokens of each sequence, for the sequence-wise loss; None for one sequence.
            replay_indices_TK: [T, K] int64, the ``topk_indices_TK`` of an earlier call, to be used
                instead of a choice; E stands for no expert. Weights, losses and gradients are those
                of tokens that choose these experts; dropped assignments are dropped again.
            prior_expert_counts_E: [E] int64, the ``expert_counts_E`` of the step's call before this
                one, for the scope ``global_batch``; None in the first call. Other scopes ignore it.
            token_mask_T: [T] bool, true for a token and false for padding; None where all are
                tokens. Padding gets no expert, takes no capacity, and is in no loss, count or mean.

        Raises ValueError for ``replay_indices_TK`` of another shape or dtype, and, on a CPU, for
        expert numbers out of range; for a ``seq_len`` that does not divide T, and for
        ``prior_expert_counts_E`` or a ``token_mask_T`` of another shape.
        """
        check_mask(token_mask_T, x_TD)
        token_rows = token_rows_of(token_mask_T)
        # The sequence-wise loss must know where a sequence begins.
        shared = self.micro_batch is not None
        if token_rows is not None and not self.config.seq_aux_loss_coeff and not shared:
            if replay_indices_TK is not None:
                check_replay(replay_indices_TK, len(x_TD), self.config)
                replay_indices_TK = token_rows.of(replay_indices_TK)
            tokens = token_rows.of(x_TD), None, replay_indices_TK, prior_expert_counts_E
            return routed_with_padding(self._routed(*tokens, None), token_rows)
        return self._routed(x_TD, seq_len, replay_indices_TK, prior_expert_counts_E, token_mask_T)

    def _routed(
        self,
        x_TD: Tensor,
        seq_len: int | None,
        replay_indices_TK: Tensor | None,
        prior_expert_counts_E: Tensor | None,
        token_mask_T: Tensor | None,
    ) -> RouterOutput:
        if prior_expert_counts_E is not None:
            check_counts("prior_expert_counts_E", prior_expert_counts_E, self.config)
        if seq_len and not torch.compiler.is_compiling() and len(x_TD) % seq_len:
            raise ValueError(f"seq_len ({seq_len}) must divide the number of tokens ({len(x_TD)})")
        if self.training and torch.is_grad_enabled():
            c = self.config
            if c.moves_biases:
                self._idle.look(self.weight)
            if c.aux_loss_scope == "previous_step" and c.aux_loss_coeff:
                self._idle_counts.look(self.weight)
        dtype = torch.promote_types(torch.float32, x_TD.dtype)
        with no_autocast(x_TD.device.type):
            if token_mask_T is not None:
                # Padding may be NaN, which the weight's gradient would multiply by 0.
                x_TD = x_TD.masked_fill(~token_mask_T.unsqueeze(1), 0)
            jitter = self.config.input_jitter
            if jitter and self.training:
                x_TD = x_TD.to(dtype)
                x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - jitter, 1 + jitter)
            weight_ED = self.weight if self.lora is None else self.lora(self.weight)
            if self.micro_batch is not None:
                assert seq_len is not None
                shared, B = self.micro_batch, len(x_TD) // seq_len
                x_BSD = x_TD.view(B, seq_len, x_TD.shape[1])
                logits_BSE = shared.linear(x_BSD, weight_ED, None, dtype)
                if self.bias is not None:
                    logits_BSE = shared.of_tokens(torch.add, logits_BSE, self.bias)
                micro_batch = whole_micro_batch(
                    shared, logits_BSE, replay_indices_TK, token_mask_T,
                    keeps_padding=bool(self.config.seq_aux_loss_coeff),
                )  # fmt: skip
                routed = self._route(*micro_batch.inputs(prior_expert_counts_E))
                own_rows = micro_batch.own_rows
                return routed if own_rows is None else routed_with_padding(routed, own_rows)
            logits_TE = with_enough_rows(lambda x: wide_linear(x, weight_ED, dtype), x_TD)
            if self.bias is not None:
                logits_TE = logits_TE + self.bias
            return self._route(
                logits_TE,
                seq_len,
                replay_indices_TK,
                prior_expert_counts_E,
                token_mask_T,
            )

    def _route(
        self,
        logits_TE: Tensor,
        seq_len: int | None,
        replay_TK: Tensor | None,
        prior_expert_counts_E: Tensor | None,
        token_mask_T: Tensor | None,
        places: Places | None = None,
    ) -> RouterOutput:
        if self._has_kernel(logits_TE) and replay_TK is None and token_mask_T is None:
            return self._route_by_kernel(logits_TE, seq_len, prior_expert_counts_E)
        E, config, mask_T = self.config.num_experts, self.config, token_mask_T
        scores_TE, probs_TE = score(logits_TE, config.score_func)
        # Where logits are not finite scores are NaN, whatever the function: sigmoid(inf) is 1.
        bad_T = ~logits_TE.detach().isfinite().all(-1)
        preferences_TE = self._preferences(logits_TE, bad_T, mask_T)
        if mask_T is not None:
            bad_T = bad_T & mask_T
        wanted_TK, placed = self._chosen(preferences_TE, scores_TE, bad_T, replay_TK, mask_T)
        counts_E = count_tokens_per_expert(wanted_TK, E + 1)[:E]
        indices_TK, dropped_TK = placed.expert_indices_TK, placed.dropped_TK
        gaps = replay_TK is not None or mask_T is not None
        if gaps or self.routing.traits.experts_choose:
            nowhere_TK = indices_TK == E
            dropped_TK = nowhere_TK if dropped_TK is None else dropped_TK | nowhere_TK
        if replay_TK is not None:
            # Dropped assignments keep their part of the sum of weights.
            indices_TK = indices_TK.where(replay_TK >= 0, wanted_TK)
        weights_TK = self.routing.weights(logits_TE, scores_TE, indices_TK, gaps)
        weights_TK = (weights_TK * config.route_scale).masked_fill(bad_T.unsqueeze(1), torch.nan)
        record_TK, rows_E = indices_TK, counts_E
        if dropped_TK is not None:
            # A token's other assignments keep their weights: a drop makes the output smaller.
            weights_TK = weights_TK.masked_fill(dropped_TK, 0)
            record_TK = indices_TK.where(~dropped_TK | (indices_TK == E), -1 - indices_TK)
            indices_TK = indices_TK.masked_fill(dropped_TK, E)
        if indices_TK is not wanted_TK:
            rows_E = count_tokens_per_expert(indices_TK, E + 1)[:E]
        expert_counts_E = self._batch_counts(counts_E, prior_expert_counts_E)
        losses = self.balancing.losses(
            RoutedTokens(
                logits_TE, probs_TE, wanted_TK, counts_E, expert_counts_E, mask_T, seq_len,
                self.token_group,
            )
        )  # fmt: skip
        entropy_T = -(probs_TE.detach() * probs_TE.detach().clamp_min(TINY).log()).sum(-1)
        routed = RouterOutput(
            logits_TE=logits_TE,
            expert_indices_TK=indices_TK,
            topk_indices_TK=record_TK,
            expert_weights_TK=weights_TK,
            rows_per_expert_E=rows_E,
            dropped_TK=dropped_TK,
            num_rerouted=placed.num_rerouted,
            tokens_per_expert_E=counts_E,
            expert_counts_E=expert_counts_E,
            margins_EM=self._margins(preferences_TE, mask_T),
            nonfinite_T=bad_T,
            num_nonfinite_tokens=bad_T.sum(),
            load_balance_loss=losses.load_balance,
            sequence_balance_loss=losses.sequence_balance,
            z_loss=losses.z,
            aux_loss=losses.total,
            entropy=mean_over_tokens(entropy_T, mask_T),
        )
        if places is None:
            return routed
        routed, own_T = own_part(routed, places), places.positions_T
        return routed._replace(
            rows_per_expert_E=count_tokens_per_expert(routed.expert_indices_TK, E + 1)[:E],
            tokens_per_expert_E=count_tokens_per_expert(wanted_TK[own_T], E + 1)[:E],
            margins_EM=self._margins(preferences_TE[own_T], None),
            num_nonfinite_tokens=routed.nonfinite_T.sum(),
            # Of the whole micro-batch, which the rank of its first token counts.
            num_rerouted=placed.num_rerouted * (own_T[:1] == 0).sum(),
        )

    def _preferences(self, logits_TE: Tensor, bad_T: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """[T, E] the values of the choice; of tokens with ``bad_T`` those of logits of 0."""
        sound_TE = logits_TE.detach().masked_fill(bad_T.unsqueeze(1), 0)
        scores_TE = score(sound_TE, self.config.score_func)[0]
        return self.routing.preferences(
            Scored(sound_TE, scores_TE, self.expert_bias, token_mask_T, self.training)
        )

    def _margins(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor | None:
        """The histogram of a balancing rule that needs one, where biases will move."""
        if not (self._bins and self.training and self.config.moves_biases):
            return None
        with torch.no_grad():
            return self.balancing.margins(preferences_TE, token_mask_T)

    def _has_kernel(self, logits_TE: Tensor) -> bool:
        """Whether one kernel does what :meth:`_route` does. It rounds otherwise in places."""
        c = self.config
        if self.exact or not kernels.available(logits_TE.device.type):
            return False
        takes_best = type(self.routing) is TopK and c.n_groups == 1
        takes_best = takes_best and c.score_func in kernels.SCORE_FUNCS
        takes_all = type(self.capacity) is Dropless and not self.capacity.max_tokens_per_rank
        fits = c.num_experts <= kernels.MAX_EXPERTS and c.top_k <= kernels.MAX_TOP_K
        return takes_best and takes_all and fits and logits_TE.dtype == torch.float32

    def _route_by_kernel(
        self, logits_TE: Tensor, seq_len: int | None, prior_expert_counts_E: Tensor | None
    ) -> RouterOutput:
        chosen = kernels.select_experts(logits_TE, self.expert_bias, self.config)
        indices_TK, counts_E = chosen.indices_TK, chosen.tokens_per_expert_E
        expert_counts_E = self._batch_counts(counts_E, prior_expert_counts_E)
        balance = balance_by_kernel(
            self.balancing, logits_TE, chosen, expert_counts_E, seq_len, self.token_group
        )
        margins_EM = None
        if self._bins:
            preferences_TE = self._preferences(logits_TE, chosen.nonfinite_T, None)
            margins_EM = self._margins(preferences_TE, None)
        return RouterOutput(
            logits_TE=logits_TE,
            expert_indices_TK=indices_TK,
            topk_indices_TK=indices_TK,
            expert_weights_TK=chosen.weights_TK,
            rows_per_expert_E=counts_E,
            dropped_TK=None,
            num_rerouted=balance.no_tokens,
            tokens_per_expert_E=counts_E,
            expert_counts_E=expert_counts_E,
            margins_EM=margins_EM,
            nonfinite_T=chosen.nonfinite_T,
            num_nonfinite_tokens=balance.num_nonfinite,
            load_balance_loss=balance.load_balance,
            sequence_balance_loss=balance.sequence_balance,
            z_loss=balance.z,
            aux_loss=balance.total,
            entropy=balance.entropy,
        )

    def keeping_choices(self) -> tuple[KeptChoices, KeptChoices]:
        """Contexts of a forward, and of the forward that computes it again: that one takes the
        experts of the first. ``parallel.apply_recompute`` enters them. Kernels, which break ties in
        one way, and compiled routers choose again."""
        choices: list[Choice] = []
        return KeptChoices(self, choices, again=False), KeptChoices(self, choices, again=True)

    def _chosen(
        self,
        preferences_TE: Tensor,
        scores_TE: Tensor,
        bad_T: Tensor,
        replay_TK: Tensor | None,
        mask_T: Tensor | None,
    ) -> Choice:
        """The experts of each token, and where capacity places them."""

        def choose() -> Choice:
            wanted_TK, kept_TK = self._choose(preferences_TE, replay_TK, mask_T)
            # Tokens whose logits are not finite give way to all others.
            priority_TE = scores_TE.detach().masked_fill(bad_T.unsqueeze(1), -1)
            num_tokens = None if mask_T is None else mask_T.sum()
            asked = Assignments(kept_TK, preferences_TE, priority_TE, self.training, num_tokens)
            return Choice(wanted_TK, self.capacity.placed(asked))

        if torch.compiler.is_compiling() or self.kept_choices is None:
            return choose()
        return self.kept_choices.of_call(choose)

    def _choose(
        self, preferences_TE: Tensor, replay_TK: Tensor | None, token_mask_T: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[T, K] the chosen experts, E for padding; and the same with E where a replay says that
        the assignment was dropped: it takes no capacity."""
        E = self.config.num_experts
        if replay_TK is None:
            wanted_TK = kept_TK = self.routing.choose(preferences_TE, token_mask_T)
        else:
            check_replay(replay_TK, len(preferences_TE), self.config)
            wanted_TK = replay_TK.where(replay_TK >= 0, -1 - replay_TK)
            kept_TK = replay_TK.masked_fill(replay_TK < 0, E)
        if token_mask_T is None:
            return wanted_TK, kept_TK
        is_padding_T1 = ~token_mask_T.unsqueeze(1)
        return wanted_TK.masked_fill(is_padding_T1, E), kept_TK.masked_fill(is_padding_T1, E)

    def _batch_counts(self, counts_E: Tensor, prior_expert_counts_E: Tensor | None) -> Tensor:
        """[E]: the assignments that the load-balancing loss counts, see ``aux_loss_scope``."""
        if self.config.aux_loss_scope == "previous_step":
            # Before the first step every expert counts as much: the loss is 1, without a gradient.
            before_E = self.step_counts_E
            return torch.ones_like(counts_E) if before_E is None else before_E.to(counts_E.device)
        micro_batch = self.config.aux_loss_scope == "micro_batch"
        group = self.token_group if micro_batch else self.balance_group
        expert_counts_E = counts_E
        if group is not None and self.config.aux_loss_coeff:
            expert_counts_E = counts_E.clone()
            dist.all_reduce(expert_counts_E, group=group)
        if micro_batch:
            return expert_counts_E
        return (
            expert_counts_E
            if prior_expert_counts_E is None
            else expert_counts_E + prior_expert_counts_E
        )

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """Raise the bias of experts below the mean load and lower the others', once per step, as
        the balancing rule says. Biases have no gradient.

        Args:
            counts: [E] the ``tokens_per_expert_E`` of the whole step, all-reduced over all ranks:
                biases stay equal on all ranks. With a balancing rule that has ``margin_bins``, as
                ``quantile``, [E, M] the ``margins_EM`` of the step, all-reduced likewise.

        Raises ValueError for a router without biases, and for counts of another shape.
        """
        if self.expert_bias is None:
            raise ValueError("expert_bias (false) must be true for update_bias")
        check_counts_of_step(counts, self.config)
        self._idle.steps = None
        self.expert_bias += self.balancing.bias_change(counts.to(self.expert_bias.device))

    def set_step_counts(self, tokens_per_expert_E: Tensor) -> None:
        """Set what the load-balancing loss of the scope ``previous_step`` counts, once per step.

        The counts are equal in all calls of the next step: the token-weighted mean of its calls'
        losses is E · Σ_i f_i · P_i with P of the whole step, however the step is cut into calls and
        ranks. The counts are part of the state of training: keep them beside a checkpoint, and set
        them again after a resume.

        Args:
            tokens_per_expert_E: [E] the assignments of the whole step over all ranks.

        Raises ValueError for another scope, and for a count of another number of experts.
        """
        if self.config.aux_loss_scope != "previous_step":
            raise ValueError(
                f"aux_loss_scope ({self.config.aux_loss_scope}) must be previous_step for "
                f"set_step_counts"
            )
        check_counts("tokens_per_expert_E", tokens_per_expert_E, self.config)
        self._idle_counts.steps = None
        self.step_counts_E = tokens_per_expert_E.detach().clone()
