"""Pipeline parallelism: which stage has which layers, and one step through all of them.

Legend: B batch, S tokens of a sequence that are here, D d_model, V vocab.

The order of work is torch.distributed.pipelining's, sends and receives included. What carries it
out is here, for what its stages lack: micro-batches of different sizes, some of them empty, and
losses that arise inside a stage, as routers' do. Every backward is an ordinary one, so that FSDP's
hooks do what they do without a pipeline, or has a second pass of its own, see
:mod:`parallel.weight_pass`, after which FSDP is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe import MoEConfig, Stopwatch
from parallel import (
    Documents,
    Kind,
    PipelineSchedule,
    Products,
    Waitable,
    WeightPass,
    finish_backward,
    run_products,
    set_gradient_sync,
    watched,
)
from pretrain.model import Decoder, DecoderOutput
from pretrain.parallelize.forward_backward import Part, next_token_loss
from pretrain.parallelize.results import Pass, Routing, routing_of
from pretrain.parallelize.schedule import padded_count, place_of

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action


class Pipeline:
    """This rank's stages of a model, and the ranks that have the others.

    Stage s is at place ``place_of(s, pp, schedule)`` of ``pp_mesh``.

    Args:
        parts: by stage, this rank's parts of the model, laid out.
        num_stages: of the whole model.
        schedule: see :class:`parallel.ParallelConfig`.
        pp_mesh: the ranks that have the stages of the same micro-batches.
        moe: of the whole model; None where it has no MoE layers.
        dtype: of what goes from one stage to the next.
        weight_pass: what :func:`parallel.apply_weight_pass` gave for the model; for schedules whose
            backwards have two passes.
    """

    def __init__(
        self,
        parts: Mapping[int, Decoder],
        num_stages: int,
        schedule: PipelineSchedule,
        pp_mesh: DeviceMesh,
        moe: MoEConfig | None,
        dtype: torch.dtype = torch.float32,
        weight_pass: WeightPass | None = None,
    ) -> None:
        self.dtype = dtype
        self.weight_pass = weight_pass or WeightPass()
        self.parts, self.num_stages, self.schedule = dict(parts), num_stages, schedule
        self.group = pp_mesh.get_group()
        self.rank, self.ranks = pp_mesh.get_local_rank(), pp_mesh.size()
        config = next(iter(self.parts.values())).config
        self.moe_layers = (
            [] if moe is None else list(range(config.first_k_dense, config.num_layers))
        )
        self.num_experts = 0 if moe is None else moe.num_experts
        self._orders: dict[int, list[_Action]] = {}
        self._rows: dict[int, Tensor] = {}

    @property
    def is_last(self) -> bool:
        """Whether logits are here."""
        return self.num_stages - 1 in self.parts

    @property
    def last_place(self) -> int:
        """Where along the pipeline logits are."""
        return place_of(self.num_stages - 1, self.ranks, self.schedule)

    def rows(self, stage: int, device: torch.device) -> Tensor:
        """Which of the model's MoE layers a stage of this rank has, int64; made once, since a copy
        to an accelerator waits for it."""
        if stage not in self._rows:
            here = self.parts[stage].blocks
            rows = [row for row, number in enumerate(self.moe_layers) if number in here]
            self._rows[stage] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._rows[stage]

    def order(self, micro_batches: int) -> list[_Action]:
        """What this rank does in a step, sends and receives included."""
        if micro_batches not in self._orders:
            from pretrain.parallelize.orders import make_orders  # which takes half a second

            orders = make_orders(
                self.schedule, self.parts, self.num_stages, micro_batches, self.group
            )
            self._orders[micro_batches] = orders[self.rank]
        return self._orders[micro_batches]

    def padded(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """With empty ones at the end where the schedule wants more, see
        :func:`pretrain.parallelize.schedule.padded_count`."""
        count = padded_count(len(micro_batches), self.ranks, len(self.parts), self.schedule)
        empty = micro_batches[0][:0]
        return [*micro_batches, *[empty] * (count - len(micro_batches))]

    def no_routing(self, device: torch.device) -> Routing | None:
        """Of no tokens; a rank without MoE layers has that to add to what others have."""
        if not self.moe_layers:
            return None
        L = len(self.moe_layers)
        counts = torch.zeros(L, self.num_experts, dtype=torch.int64, device=device)
        sums = torch.zeros(L, dtype=torch.float64, device=device)
        return Routing(counts, sums, counts.new_zeros(L, 2), counts.new_zeros(L))

    def peer(self, stage: int) -> int:
        """The global rank that has a stage."""
        return dist.get_global_rank(self.group, place_of(stage, self.ranks, self.schedule))

    def forward(
        self, inputs_BS: Tensor, part: Part, documents: Documents | None = None
    ) -> tuple[Tensor | None, Routing | None]:
        """Forward alone, one stage after another: the logits where the last stage is, and what the
        routers of this rank's stages did."""
        x, routing = inputs_BS, self.no_routing(inputs_BS.device)
        for stage in range(self.num_stages):
            if stage not in self.parts:
                continue
            if stage and stage - 1 not in self.parts:
                x = self._room(inputs_BS, part)
                _wait(self._post(dist.irecv, x, stage - 1, stage))
            out: DecoderOutput = self.parts[stage](x, None, documents)
            routed = inputs_BS.numel() // part.tp_degree
            routing = self._routing(stage, out, routed, routing)
            x = out.logits
            if stage < self.num_stages - 1 and stage + 1 not in self.parts:
                _wait(self._post(dist.isend, x.contiguous(), stage + 1, stage + 1))
        return (x if self.is_last else None), routing

    def forward_backward(
        self,
        micro_batches: Sequence[Tensor],
        divisor: float,
        device: torch.device,
        part: Part,
        reduce_once: bool,
    ) -> Pass:
        """As :func:`forward_backward` without a pipeline; every rank of the pipeline must call."""
        return _Step(self, micro_batches, divisor, device, part, reduce_once).run()

    def _room(self, inputs_BS: Tensor, part: Part) -> Tensor:
        """For what a stage takes: [B, S / tp, D]."""
        B, S = inputs_BS.shape
        d_model = next(iter(self.parts.values())).config.d_model
        shape = B, S // part.tp_degree, d_model
        return torch.empty(shape, dtype=self.dtype, device=inputs_BS.device)

    def _post(self, how: Any, tensor: Tensor, stage: int, tag: int) -> list[Waitable]:
        """Begin to send to a stage or receive from it; nothing travels where there is nothing."""
        if not tensor.numel():
            return []
        op = dist.P2POp(how, tensor, self.peer(stage), self.group, tag)
        kind = Kind("send" if how is dist.isend else "recv", "pp")
        return [watched(kind, tensor, self.group, lambda: dist.batch_isend_irecv([op])[0])]

    def _routing(
        self, stage: int, out: DecoderOutput, routed: int, before: Routing | None
    ) -> Routing | None:
        if not out.aux:
            return before
        rows = self.rows(stage, out.logits.device)
        return routing_of(out.aux, routed).placed(rows, len(self.moe_layers)).plus(before)


class _Step:
    """One step of a pipeline on one rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: Sequence[Tensor],
        divisor: float,
        device: torch.device,
        part: Part,
        reduce_once: bool,
    ) -> None:
        self.pipeline, self.part, self.divisor = pipeline, part, divisor
        self.reduce_once = reduce_once
        batches = pipeline.padded(micro_batches)
        self.batches = [batch.to(device, non_blocking=True) for batch in batches]
        pairs = [part.inputs_and_targets(batch) for batch in self.batches]
        self.inputs, self.targets = zip(*pairs, strict=True)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.target_tokens = 0
        self.routing = pipeline.no_routing(device)
        self.stopwatches: list[Stopwatch] = []
        self.counts: dict[int, list[Tensor]] = {}
        self.order = pipeline.order(len(batches))
        self.backwards_left = dict.fromkeys(pipeline.parts, len(batches))
        self.halfway = dict.fromkeys(pipeline.parts, 0)
        # By stage and micro-batch, what those backwards put aside that have two passes.
        self.products: dict[tuple[int, int | None], Products] = {
            (action.stage_index, action.microbatch_index): deque()
            for action in self.order
            if action.computation_type.name == "BACKWARD_INPUT"
        }
        # By stage and micro-batch: what came, what is kept for the backward, and what goes.
        self.arriving: dict[tuple[str, int, int], tuple[Tensor, list[Waitable]]] = {}
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor, list[Tensor]]] = {}
        self.leaving: dict[tuple[str, int, int], Tensor] = {}
        self.sent: deque[tuple[Tensor, list[Waitable]]] = deque()

    def run(self) -> Pass:
        with self.part.vocabulary_parallel():
            for action in self.order:
                act = getattr(self, f"_{action.computation_type.name.lower()}", None)
                if act is not None:  # gathering and reducing parameters is left to FSDP's hooks
                    act(action.stage_index, action.microbatch_index)
        for _, works in self.sent:
            _wait(works)
        return Pass(self.loss_sum, self.target_tokens, self.routing, tuple(self.stopwatches))

    def _recv_f(self, stage: int, turn: int) -> None:
        x = self.pipeline._room(self.inputs[turn], self.part)
        works = self.pipeline._post(dist.irecv, x, stage - 1, self._tag("F", stage, turn))
        self.arriving["F", stage, turn] = x, works

    def _recv_b(self, stage: int, turn: int) -> None:
        grad = self.pipeline._room(self.inputs[turn], self.part)
        works = self.pipeline._post(dist.irecv, grad, stage + 1, self._tag("B", stage, turn))
        self.arriving["B", stage, turn] = grad, works

    def _send_f(self, stage: int, turn: int) -> None:
        self._send(self.leaving.pop(("F", stage, turn)), stage + 1, self._tag("F", stage + 1, turn))

    def _send_b(self, stage: int, turn: int) -> None:
        self._send(self.leaving.pop(("B", stage, turn)), stage - 1, self._tag("B", stage - 1, turn))

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        self.sent.append((tensor, self.pipeline._post(dist.isend, tensor, stage, tag)))
        # Few are held. What a send waits for, its receiver was given before anything that comes
        # after the send, and so never waits for this rank.
        while len(self.sent) > 2 * self.pipeline.ranks:
            _wait(self.sent.popleft()[1])

    def _tag(self, kind: str, stage: int, turn: int) -> int:
        return (turn * self.pipeline.num_stages + stage) * 2 + (kind == "B")

    def _arrived(self, kind: str, stage: int, turn: int) -> Tensor:
        tensor, works = self.arriving.pop((kind, stage, turn))
        _wait(works)
        return tensor

    def _forward(self, stage: int, turn: int) -> None:
        x = self._arrived("F", stage, turn).requires_grad_() if stage else self.inputs[turn]
        # Made anew by every stage: kept for all micro-batches, masks would be large.
        documents = self.part.documents(self.batches[turn][:, :-1])
        with self.pipeline.weight_pass.into(self.products.get((stage, turn))):
            out: DecoderOutput = self.pipeline.parts[stage](x, self.counts.get(stage), documents)
        self.counts[stage] = [aux.expert_counts_E for aux in out.aux]
        tokens = self.inputs[turn].numel()
        routed = tokens // self.part.tp_degree
        extra = [routed / self.divisor * aux.aux_loss for aux in out.aux]
        root = out.logits
        if stage == self.pipeline.num_stages - 1:
            nll = next_token_loss(out.logits, self.targets[turn])
            root = nll / self.divisor
            if self.part.counts:
                self.loss_sum += nll.detach()
                self.target_tokens += tokens
        else:
            self._leave("F", stage, stage + 1, turn, root.detach().contiguous())
        self.kept[stage, turn] = x, root, extra
        self.routing = self.pipeline._routing(stage, out, routed, self.routing)
        self.stopwatches += [aux.stopwatch for aux in out.aux]

    def _full_backward(self, stage: int, turn: int) -> None:
        self.backwards_left[stage] -= 1
        set_gradient_sync(
            self.pipeline.parts[stage], not self.reduce_once, last=not self.backwards_left[stage]
        )
        self._run_backward(stage, turn)

    def _backward_input(self, stage: int, turn: int) -> None:
        self.halfway[stage] += 1
        set_gradient_sync(self.pipeline.parts[stage], False, last=False)
        with self.pipeline.weight_pass.into(self.products[stage, turn]):
            self._run_backward(stage, turn)

    def _backward_weight(self, stage: int, turn: int) -> None:
        run_products(self.products[stage, turn])
        self.backwards_left[stage] -= 1
        self.halfway[stage] -= 1
        # Reduced is where no backward is halfway: then all parameters have gradients, as what sums
        # them over copies takes for granted. No schedule has a full backward where one is.
        sync = not self.reduce_once and not self.halfway[stage]
        finish_backward(self.pipeline.parts[stage], sync, last=not self.backwards_left[stage])

    def _run_backward(self, stage: int, turn: int) -> None:
        x, root, extra = self.kept.pop((stage, turn))
        last = stage == self.pipeline.num_stages - 1
        grad = None if last else self._arrived("B", stage, turn)
        extra = [loss for loss in extra if loss.requires_grad]
        torch.autograd.backward([root, *extra], [grad, *[None] * len(extra)])
        if stage:
            assert x.grad is not None
            self._leave("B", stage, stage - 1, turn, x.grad.contiguous())

    def _leave(self, kind: str, stage: int, to: int, turn: int, tensor: Tensor) -> None:
        """What a stage gives to a neighbour, which may be on this rank: then nothing is sent."""
        if to in self.pipeline.parts:
            self.arriving[kind, to, turn] = tensor, []
        else:
            self.leaving[kind, stage, turn] = tensor


def _wait(works: Sequence[Waitable]) -> None:
    for work in works:
        work.wait()
