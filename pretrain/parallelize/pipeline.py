"""Pipeline parallelism: one step through the stages of a model.

Legend: B batch, S tokens of a sequence on this rank, D d_model, V vocab.

The order of a step's actions, with sends and receives, comes from torch.distributed.pipelining.
This module runs the actions, because PyTorch's stages do not take micro-batches of different sizes,
empty micro-batches, or losses that arise inside a stage, as the routers' do. A full backward is an
ordinary backward, so that FSDP's hooks work as they do without a pipeline. A backward with delayed
weight gradients (:class:`parallel.WeightGradStore`) ends with :func:`parallel.finish_backward`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe import MoEConfig, Stopwatch
from parallel import (
    CollectiveKind,
    Documents,
    PipelineSchedule,
    WeightGradStore,
    finish_backward,
    free_gathered,
    on_loss_grid,
    set_gradient_sync,
)
from parallel.comm import CollectiveWork, monitored
from pretrain.model import Decoder, DecoderOutput
from pretrain.parallelize.micro_batches import (
    LocalBatch,
    RoutedTokens,
    depth_of,
    mask_of,
    mtp_losses,
    summed_mtp_losses,
)
from pretrain.parallelize.mtp import NO_MTP, MTPLoss
from pretrain.parallelize.results import AUX_LOSSES, RoutingStats, StepResult, routing_stats
from pretrain.parallelize.schedule import padded_count, place_of
from router import to_device

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action

FSDP_ACTIONS = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD"})
"""Actions of PyTorch's schedules that FSDP's hooks do already, and a step leaves out."""


class Pipeline:
    """This rank's stages of a model, and the ranks that have the other stages.

    Stage s is at place ``place_of(s, pp, schedule)`` of ``pp_mesh``.

    Args:
        stages: this rank's parallelized stages, by number.
        num_stages: the number of stages of the model.
        schedule: as ``schedule`` of :class:`parallel.ParallelConfig`.
        pp_mesh: the ranks of one pipeline.
        moe: the MoE config of the model; None for a model without MoE layers.
        dtype: dtype of activations between stages.
        weight_grads: the store that :func:`parallel.apply_delayed_weight_grad` returned for the
            model. Without a store no schedule delays weight gradients.
    """

    def __init__(
        self,
        stages: Mapping[int, Decoder],
        num_stages: int,
        *,
        schedule: PipelineSchedule,
        pp_mesh: DeviceMesh,
        moe: MoEConfig | None,
        dtype: torch.dtype = torch.float32,
        weight_grads: WeightGradStore | None = None,
    ) -> None:
        self.dtype = dtype
        self.delays_weight_grads = weight_grads is not None
        self.weight_grads = weight_grads or WeightGradStore()
        self.stages, self.num_stages, self.schedule = dict(stages), num_stages, schedule
        self.group = pp_mesh.get_group()
        self.rank, self.ranks = pp_mesh.get_local_rank(), pp_mesh.size()
        config = next(iter(self.stages.values())).config
        self.moe_layers = [] if moe is None else config.moe_layers
        self.num_experts = 0 if moe is None else moe.num_experts
        self.margin_bins = 0
        if moe is not None and moe.moves_biases:
            self.margin_bins = moe.balancing_traits.margin_bins
        self._orders: dict[int, list[_Action]] = {}
        self._rows: dict[int, Tensor] = {}

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so the logits."""
        return self.num_stages - 1 in self.stages

    @property
    def last_place(self) -> int:
        """The place along the pipeline of the last stage."""
        return place_of(self.num_stages - 1, self.ranks, self.schedule)

    def rows(self, stage: int, device: torch.device) -> Tensor:
        """int64 indices, among the model's MoE layers, of the MoE layers of a stage of this
        rank."""
        if stage not in self._rows:
            blocks = self.stages[stage].blocks
            rows = [row for row, number in enumerate(self.moe_layers) if number in blocks]
            self._rows[stage] = to_device(rows, device)
        return self._rows[stage]

    def order(self, micro_batches: int) -> list[_Action]:
        """This rank's actions of a step of ``micro_batches``, with sends and receives."""
        if micro_batches not in self._orders:
            # Imported here: the import takes half a second.
            from pretrain.parallelize.orders import make_orders

            orders = make_orders(
                self.schedule,
                self.stages,
                num_stages=self.num_stages,
                micro_batches=micro_batches,
                group=self.group,
            )
            self._orders[micro_batches] = orders[self.rank]
        return self._orders[micro_batches]

    def padded(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """``micro_batches`` with empty ones at the end, as many as
        :func:`pretrain.parallelize.schedule.padded_count` says."""
        count = padded_count(
            len(micro_batches),
            self.ranks,
            stages_per_rank=len(self.stages),
            schedule=self.schedule,
        )
        empty = micro_batches[0][:0]
        return [*micro_batches, *[empty] * (count - len(micro_batches))]

    def no_routing(self, device: torch.device, training: bool = False) -> RoutingStats | None:
        """Stats of no tokens, for a sum over ranks; None for a model without MoE layers."""
        if not self.moe_layers:
            return None
        L = len(self.moe_layers)
        counts = torch.zeros(L, self.num_experts, dtype=torch.int64, device=device)
        sums = torch.zeros(L, dtype=torch.float64, device=device)
        losses = sums.new_zeros(L, len(AUX_LOSSES))
        zeros_L = counts.new_zeros(L)
        margins = None
        if training and self.margin_bins:
            margins = counts.new_zeros(L, self.num_experts, self.margin_bins)
        moved_L3 = counts.new_zeros(L, 3)
        return RoutingStats(counts, sums, moved_L3, zeros_L, losses, zeros_L, margins)

    def peer(self, stage: int) -> int:
        """The global rank of a stage of this pipeline."""
        return dist.get_global_rank(self.group, place_of(stage, self.ranks, self.schedule))

    def forward(
        self,
        inputs_BS: Tensor,
        local_batch: LocalBatch,
        documents: Documents | None = None,
        routed: RoutedTokens | None = None,
    ) -> tuple[DecoderOutput | None, RoutingStats | None]:
        """A forward without a backward; every rank of the pipeline must call.

        ``routed`` are the tokens that MoE layers route; None where all inputs are tokens. Returns
        the last stage's output, or None on ranks without the last stage, and the routing stats of
        this rank's stages.
        """
        if routed is None:
            tokens = inputs_BS.numel() // local_batch.tp_degree
            routed = RoutedTokens(None, tokens, tokens, tokens)
        mask = mask_of(routed, inputs_BS.device)
        out: DecoderOutput | None = None
        x, routing = inputs_BS, self.no_routing(inputs_BS.device)
        for stage in range(self.num_stages):
            if stage not in self.stages:
                continue
            if stage and stage - 1 not in self.stages:
                x = self._buffer(inputs_BS, local_batch)
                _wait(self._start(dist.irecv, x, peer=stage - 1, tag=stage))
            out = self.stages[stage](x, None, documents, **mask)
            assert out is not None
            routing = self._add_routing(routing, stage, out, routed)
            x = out.logits
            if stage < self.num_stages - 1 and stage + 1 not in self.stages:
                _wait(self._start(dist.isend, x.contiguous(), peer=stage + 1, tag=stage + 1))
        return (out if self.is_last else None), routing

    def forward_backward(
        self,
        micro_batches: Sequence[Tensor],
        divisor: float,
        *,
        device: torch.device,
        local_batch: LocalBatch,
        reduce_once: bool,
        mtp: MTPLoss = NO_MTP,
    ) -> StepResult:
        """As :func:`pretrain.parallelize.micro_batches`, through all stages; every rank of the
        pipeline must call.

        Raises RuntimeError for an action of PyTorch's schedule that Convoy does not know.
        """
        options: dict[str, Any] = {"device": device, "local_batch": local_batch, "mtp": mtp}
        return _Step(self, micro_batches, divisor=divisor, reduce_once=reduce_once, **options).run()

    def _buffer(self, inputs_BS: Tensor, local_batch: LocalBatch) -> Tensor:
        """An empty tensor for a stage's input: [B, S / tp, D], B as in the first stage's."""
        B, S = inputs_BS.shape
        d_model = next(iter(self.stages.values())).config.d_model
        shape = B, S // local_batch.tp_degree, d_model
        return torch.empty(shape, dtype=self.dtype, device=inputs_BS.device)

    def _start(self, how: Any, tensor: Tensor, *, peer: int, tag: int) -> list[CollectiveWork]:
        """Start a send to the stage ``peer``, or a receive from it; an empty tensor is not sent."""
        if not tensor.numel():
            return []
        op = dist.P2POp(how, tensor, self.peer(peer), self.group, tag)
        kind = CollectiveKind("send" if how is dist.isend else "recv", "pp")
        return [monitored(kind, tensor, self.group, lambda: dist.batch_isend_irecv([op])[0])]

    def _add_routing(
        self, before: RoutingStats | None, stage: int, out: DecoderOutput, routed: RoutedTokens
    ) -> RoutingStats | None:
        if not out.aux:
            return before
        # A forward without multi-token prediction has no reports of its layers, which come last.
        rows = self.rows(stage, out.logits.device)[: len(out.aux)]
        stats = routing_stats(out.aux, routed.tokens, routed.counted_weight)
        return stats.placed(rows, len(self.moe_layers)).plus(before)


class _Step:
    """One step of a pipeline on one rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: Sequence[Tensor],
        *,
        divisor: float,
        device: torch.device,
        local_batch: LocalBatch,
        reduce_once: bool,
        mtp: MTPLoss = NO_MTP,
    ) -> None:
        self.pipeline, self.local_batch, self.divisor = pipeline, local_batch, divisor
        self.reduce_once = reduce_once
        batches = pipeline.padded(micro_batches)
        self.routed = [local_batch.routed_tokens(batch) for batch in batches]
        self.batches = [batch.to(device, non_blocking=True) for batch in batches]
        pairs = [local_batch.training_inputs(batch) for batch in self.batches]
        self.inputs, self.targets = zip(*pairs, strict=True)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.mtp, self.mtp_loss_sums_K = mtp, self.loss_sum.new_zeros(len(mtp.weights))
        self.target_tokens = 0
        self.routing = pipeline.no_routing(device, training=True)
        self.stopwatches: list[Stopwatch] = []
        self.counts: dict[int, list[Tensor]] = {}
        self.order = pipeline.order(len(batches))
        self.backwards_left = dict.fromkeys(pipeline.stages, len(batches))
        # By stage: backwards whose weight gradients are not computed yet.
        self.without_weight_grads = dict.fromkeys(pipeline.stages, 0)
        # The backwards with delayed weight gradients, by stage and micro-batch.
        self.delayed = {
            (action.stage_index, action.microbatch_index)
            for action in self.order
            if action.computation_type.name == "BACKWARD_INPUT" and pipeline.delays_weight_grads
        }
        # By direction ("F" or "B"), stage and micro-batch: received tensors, and tensors to send.
        self.received: dict[tuple[str, int, int], tuple[Tensor, list[CollectiveWork]]] = {}
        self.to_send: dict[tuple[str, int, int], Tensor] = {}
        # By stage and micro-batch: input, output and auxiliary losses, for the backward.
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor, list[Tensor]]] = {}
        self.sent: deque[tuple[Tensor, list[CollectiveWork]]] = deque()
        # By the name of PyTorch's computation type.
        self.actions: dict[str, Callable[[int, int], None]] = {
            "FORWARD": self._forward,
            "FULL_BACKWARD": self._full_backward,
            "BACKWARD_INPUT": self._backward_input,
            "BACKWARD_WEIGHT": self._backward_weight,
            "SEND_F": self._send_f,
            "RECV_F": self._recv_f,
            "SEND_B": self._send_b,
            "RECV_B": self._recv_b,
        }
        if not pipeline.delays_weight_grads:
            self.actions["BACKWARD_INPUT"] = self._full_backward
            self.actions["BACKWARD_WEIGHT"] = lambda *_: None

    def run(self) -> StepResult:
        with self.local_batch.vocabulary_parallel():
            for action in self.order:
                self._run_action(action)
        for _, works in self.sent:
            _wait(works)
        return StepResult(
            self.loss_sum, self.target_tokens, self.routing, tuple(self.stopwatches),
            self.mtp_loss_sums_K,
        )  # fmt: skip

    def _run_action(self, action: _Action) -> None:
        name = action.computation_type.name
        if name in FSDP_ACTIONS:
            return
        if name not in self.actions:
            raise RuntimeError(
                f"torch {torch.__version__} has a pipeline action that Convoy does not know: "
                f"{action} ({name}); known are {', '.join(sorted({*self.actions, *FSDP_ACTIONS}))}"
            )
        assert action.microbatch_index is not None
        self.actions[name](action.stage_index, action.microbatch_index)

    def _recv_f(self, stage: int, turn: int) -> None:
        self._recv("F", stage, turn, peer=stage - 1)

    def _recv_b(self, stage: int, turn: int) -> None:
        self._recv("B", stage, turn, peer=stage + 1)

    def _recv(self, direction: str, stage: int, turn: int, *, peer: int) -> None:
        x = self.pipeline._buffer(self.inputs[turn], self.local_batch)
        tag = self._tag(direction, stage, turn)
        works = self.pipeline._start(dist.irecv, x, peer=peer, tag=tag)
        self.received[direction, stage, turn] = x, works

    def _send_f(self, stage: int, turn: int) -> None:
        self._send("F", stage, turn, peer=stage + 1)

    def _send_b(self, stage: int, turn: int) -> None:
        self._send("B", stage, turn, peer=stage - 1)

    def _send(self, direction: str, stage: int, turn: int, *, peer: int) -> None:
        tensor, tag = self.to_send.pop((direction, stage, turn)), self._tag(direction, peer, turn)
        self.sent.append((tensor, self.pipeline._start(dist.isend, tensor, peer=peer, tag=tag)))
        # Few sent tensors are held. The wait below ends: the receiver starts its receive without
        # waiting for anything that this rank does after the send.
        while len(self.sent) > 2 * self.pipeline.ranks:
            _wait(self.sent.popleft()[1])

    def _tag(self, direction: str, stage: int, turn: int) -> int:
        return (turn * self.pipeline.num_stages + stage) * 2 + (direction == "B")

    def _wait_for(self, direction: str, stage: int, turn: int) -> Tensor:
        tensor, works = self.received.pop((direction, stage, turn))
        _wait(works)
        return tensor

    def _forward(self, stage: int, turn: int) -> None:
        x = self._wait_for("F", stage, turn).requires_grad_() if stage else self.inputs[turn]
        routed = self.routed[turn]
        # Every stage makes the documents' masks: masks of all micro-batches would be large.
        documents = self.local_batch.documents(self.batches[turn][:, :-1])
        key = (stage, turn) if (stage, turn) in self.delayed else None
        with self.pipeline.weight_grads.collect(key):
            before, depth = self.counts.get(stage), depth_of(self.local_batch)
            mask = mask_of(routed, x.device)
            out: DecoderOutput = self.pipeline.stages[stage](x, before, documents, *depth, **mask)
        self.counts[stage] = [aux.expert_counts_E for aux in out.aux]
        targets_BS, *later = self.targets[turn]
        extra = [routed.loss_weight / self.divisor * aux.aux_loss for aux in out.aux]
        root = out.logits
        if stage == self.pipeline.num_stages - 1:
            nll = self.local_batch.next_token_loss(out.logits, targets_BS)
            root = nll / self.divisor
            mtp_nlls = mtp_losses(out, later, self.local_batch)
            for mtp_nll, weight in zip(mtp_nlls, self.mtp.weights, strict=True):
                root = root + weight / self.divisor * mtp_nll
            if self.local_batch.owns_loss:
                self.loss_sum += on_loss_grid(nll.detach())
                self.mtp_loss_sums_K += summed_mtp_losses(mtp_nlls, like=self.mtp_loss_sums_K)
                batch = self.batches[turn]
                self.target_tokens += self.local_batch.count_targets(batch, targets_BS)
        else:
            self._hand_over("F", stage, turn, root.detach().contiguous(), peer=stage + 1)
        self.saved[stage, turn] = x, root, extra
        self.routing = self.pipeline._add_routing(self.routing, stage, out, routed)
        self.stopwatches += [aux.stopwatch for aux in out.aux if aux.stopwatch is not None]

    def _full_backward(self, stage: int, turn: int) -> None:
        self.backwards_left[stage] -= 1
        set_gradient_sync(
            self.pipeline.stages[stage],
            sync=not self.reduce_once,
            last=not self.backwards_left[stage],
        )
        self._run_backward(stage, turn)

    def _backward_input(self, stage: int, turn: int) -> None:
        self.without_weight_grads[stage] += 1
        set_gradient_sync(self.pipeline.stages[stage], sync=False, last=False)
        with self.pipeline.weight_grads.collect((stage, turn)):
            self._run_backward(stage, turn)

    def _backward_weight(self, stage: int, turn: int) -> None:
        self.pipeline.weight_grads.compute((stage, turn))
        self.backwards_left[stage] -= 1
        self.without_weight_grads[stage] -= 1
        # FSDP reduces when no backward lacks its weight gradients: then all parameters have
        # gradients, which the sum over replicas requires. No schedule has a full backward while
        # another backward lacks its weight gradients.
        sync = not self.reduce_once and not self.without_weight_grads[stage]
        last = not self.backwards_left[stage]
        finish_backward(self.pipeline.stages[stage], sync=sync, last=last)

    def _run_backward(self, stage: int, turn: int) -> None:
        x, root, extra = self.saved.pop((stage, turn))
        last = stage == self.pipeline.num_stages - 1
        grad = None if last else self._wait_for("B", stage, turn)
        extra = [loss for loss in extra if loss.requires_grad]
        if not root.requires_grad:
            # The first stages of a tuned model may have nothing that learns. What the forward has
            # gathered is freed at the end of a backward, and there is none.
            free_gathered(self.pipeline.stages[stage])
            return
        torch.autograd.backward([root, *extra], [grad, *[None] * len(extra)])
        if stage:
            assert x.grad is not None
            self._hand_over("B", stage, turn, x.grad.contiguous(), peer=stage - 1)

    def _hand_over(
        self, direction: str, stage: int, turn: int, tensor: Tensor, *, peer: int
    ) -> None:
        """Keep a tensor for the stage ``peer``: for a send, or where this rank has that stage for
        its forward or backward."""
        if peer in self.pipeline.stages:
            self.received[direction, peer, turn] = tensor, []
        else:
            self.to_send[direction, stage, turn] = tensor


def _wait(works: Sequence[CollectiveWork]) -> None:
    for work in works:
        work.wait()
