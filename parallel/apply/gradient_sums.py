"""How FSDP sums gradients: within a replica, over replicas, and exactly; and who may look on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from parallel.comm import all_gather, all_reduce, reduce_scatter
from parallel.crossing import installed_crossing
from parallel.exact import ExactSums, FixedPointBuffer, from_fixed

_SUMS = "_convoy_gradient_sums"

Seen = Callable[[Tensor], None]
"""Gets gradients that are about to be summed, and must not change or keep them."""


@dataclass(frozen=True)
class GradientSums:
    """How a model under FSDP sums its gradients."""

    within_replica: list[_ReduceScatter]
    """Of each FSDP module."""
    over_replicas: _ReplicaSum | None
    """None where FSDP does not sum over replicas, and holds no exact sums."""
    keeps_gathered: bool
    """Whether gathered parameters stay until the step's last backward."""

    @property
    def exact(self) -> bool:
        """Whether each micro-batch's gradients must be seen by themselves."""
        return any(reduction.buffer is not None for reduction in self.within_replica)

    def begin(self) -> None:
        """Begin a step: whatever an abandoned step has left is forgotten."""
        for reduction in self.within_replica:
            reduction.kept = None
        if self.over_replicas is not None:
            self.over_replicas.begin()

    def expect(self, *, sync: bool, last: bool) -> None:
        """Set what the next backward is: see :func:`parallel.apply.fsdp.set_gradient_sync`."""
        for reduction in self.within_replica:
            reduction.keeps = not (sync or last)
        if self.over_replicas is not None:
            self.over_replicas.expect(last)


def sums_of(model: nn.Module) -> GradientSums | None:
    """The sums of a model; None without FSDP."""
    sums: GradientSums | None = vars(model).get(_SUMS)
    return sums


def set_sums(
    model: nn.Module,
    modules: Sequence[tuple[FSDPModule, DeviceMesh]],
    *,
    replicas: dist.ProcessGroup | None,
    exact: ExactSums | None,
    keeps_gathered: bool,
) -> None:
    """Let FSDP sum instead of average, over replicas too, by monitored collectives.

    Args:
        model: the model.
        modules: its FSDP modules, each with the mesh that shards it.
        replicas: the ranks that hold replicas of this rank's shards; None where nothing is summed
            over replicas, or there is one replica.
        exact: sums gradients exactly.
        keeps_gathered: see :class:`GradientSums`.
    """
    over = None if replicas is None and exact is None else _ReplicaSum(replicas)
    within = []
    for number, (fsdp, mesh) in enumerate(modules):
        if over is not None:
            fsdp.set_all_reduce_hook(partial(over, number))
            # The hook must run for every module in the step's last backward, also for a module
            # that this backward did not use.
            _sum_also_unused(fsdp)
        if mesh.size() > 1:  # of one rank the average is the sum, and FSDP would divide by 1
            fsdp.set_gradient_divide_factor(1.0)
        # Otherwise FSDP asks gloo for a reduction with a divide factor, which gloo lacks.
        fsdp.set_force_sum_reduction_for_comms(True)
        fsdp.set_custom_all_gather(cast(Any, _AllGather()))
        within.append(_ReduceScatter())
        fsdp.set_custom_reduce_scatter(cast(Any, within[-1]))
        if exact is not None and over is not None:
            buffer = exact.buffer_of(cast(nn.Module, fsdp), mesh.size())
            within[-1].buffer = over.buffers[number] = buffer
    # nn.Module.__setattr__ is passed by: the sums are neither modules nor parameters.
    vars(model)[_SUMS] = GradientSums(within, over, keeps_gathered)


def _sum_also_unused(fsdp: FSDPModule) -> None:
    """Raises RuntimeError where torch, before 2.12, would leave gradients without their sum."""
    set_wanted = getattr(fsdp, "set_reduce_scatter_unused_params", None)
    if set_wanted is None:
        raise RuntimeError(
            "replicas (parallel.dp_replicate) and exact sums (train.exact) must have torch 2.12 or "
            f"later, not {torch.__version__}, which leaves out the gradient of a module that the "
            "step's last micro-batch does not use; take dp_shard without them, or a newer torch"
        )
    set_wanted(True)


@contextmanager
def gradients_seen(
    model: nn.Module,
    *,
    within: Seen,
    over: Seen,
    sum_replicas: bool,
    first_unit: bool = False,
    experts: bool = True,
) -> Iterator[None]:
    """Inside the ``with`` block, see gradients before they are summed over other ranks.

    Calls come in the order of the backward, on the stream that reduces. Of a model without FSDP
    nothing is seen.

    Args:
        model: the model, after :func:`apply_fsdp`.
        within: gets what this rank adds to each sum within its replica.
        over: gets what this rank's replica adds to each sum over replicas, where FSDP does that
            sum.
        sum_replicas: with False gradients are not summed over replicas. Every replica must choose
            alike.
        first_unit: of each sum within a replica ``within`` gets the first micro-batch alone.
        experts: whether ``within`` gets exact sums of experts' gradients, which have rows of other
            ranks.
    """
    sums = sums_of(model)
    if sums is None:
        yield
        return
    replicas = sums.over_replicas
    try:
        for reduction in sums.within_replica:
            if experts or reduction.buffer is None or reduction.buffer.experts is None:
                first_alone = partial(_first_alone, reduction, within)
                reduction.seen = first_alone if first_unit else within
        if replicas is not None:
            replicas.seen, replicas.sums = over, sum_replicas
        yield
    finally:
        for reduction in sums.within_replica:
            reduction.seen = None
        if replicas is not None:
            replicas.seen, replicas.sums = None, True


def _first_alone(reduction: _ReduceScatter, seen: Seen, gradients: Tensor) -> None:
    reduction.seen = None
    seen(gradients)


class _ReplicaSum:
    """Sums gradients over replicas, after FSDP's reduce-scatter within a replica.

    FSDP2 can do this all-reduce itself, given a two-dimensional mesh (HSDP). Convoy keeps its own
    for two reasons. First, the all-reduce goes through the comm monitor: FSDP2 lets a caller
    replace the all-gather and the reduce-scatter, but not the all-reduce, which would then be
    missing from exposed communication and from hang reports. Second, parameters stay sharded over
    one mesh dim, whether this class or :class:`parallel.CompressedSum`, which FSDP cannot replace,
    sums over replicas; a run can change ``gradient_compression`` without another layout.

    Exact sums use this class for one replica too, to hold the sums of micro-batches in 64 bits.

    Where replicas come and leave, a sum that fails lets the backward end, with wrong gradients:
    the ranks of a replica must stay in step. :func:`parallel.crossing.check_sums` raises the error.

    Args:
        group: the ranks that hold replicas of this rank's shards; None for one replica.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.buffers: dict[int, FixedPointBuffer] = {}
        """Under exact sums, by number of the module."""
        self.last = True
        """Whether the next backward is the step's last."""
        self._unsummed: dict[int, Tensor] = {}
        self.seen: Seen | None = None
        self.sums = True
        """Whether the step's last backward sums over replicas."""

    def begin(self) -> None:
        """Begin a step: whatever an abandoned step has left is forgotten."""
        self._unsummed.clear()
        self.last = True

    def expect(self, last: bool) -> None:
        """Set whether the next backward is the step's last."""
        if self.last:
            self._unsummed.clear()  # a new step, where nobody has said so
        self.last = last

    def __call__(self, module: int, reduced: Tensor) -> None:
        if reduced.is_cuda:
            # FSDP allocated the tensor on another stream, and may free it before the current
            # stream has read it.
            reduced.record_stream(torch.cuda.current_stream())
        gradients, buffer = reduced, self.buffers.get(module)
        if buffer is not None:
            # Without other ranks FSDP does no reduce-scatter, which would have converted.
            reduced = reduced.view(torch.int64) if buffer.ranks > 1 else buffer.fixed(reduced)
        before = self._unsummed.pop(module, None)
        if before is not None:
            assert before.shape == reduced.shape, "some of its parameters had no gradient"
            reduced += before
        if self.last:
            if self.seen is not None:
                self.seen(reduced)
            if self.sums and self.group is not None:
                self._sum(reduced, self.group)
            if buffer is not None:
                from_fixed(reduced, gradients)
        else:
            # FSDP adds `reduced` to the gradient: zeros until the step's last backward.
            self._unsummed[module] = reduced.clone()
            reduced.zero_()

    def _sum(self, reduced: Tensor, group: dist.ProcessGroup) -> None:
        crossing = installed_crossing()
        if crossing is None or crossing.column is None:
            all_reduce(reduced, group, "dp").wait()
        elif crossing.error is None:
            try:
                all_reduce(reduced, crossing.column, "dp").wait()
            except RuntimeError as error:
                crossing.error = error


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocate):
    """FSDP's all-gather, monitored. FSDP never passes ``async_op=True``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        all_gather(output_tensor, input_tensor, group, "dp").wait()


class _ReduceScatter(_Allocate):
    """FSDP's reduce-scatter, monitored. FSDP never passes ``async_op=True``."""

    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.buffer: FixedPointBuffer | None = None
        """Under exact sums."""
        self.keeps = False
        """Under exact sums: whether the next gradients wait for the step's last backward."""
        self.kept: Tensor | None = None
        """The sum over micro-batches that waits."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if self.buffer is not None:
            input_tensor = self.buffer.fixed(input_tensor)
            output_tensor = output_tensor.view(torch.int64)
        if self.seen is not None:
            self.seen(input_tensor)
        if self.kept is not None:
            input_tensor += self.kept
            self.kept = None
        if self.buffer is not None and self.keeps:
            self.kept = input_tensor
            output_tensor.zero_()
            return
        reduce_scatter(output_tensor, input_tensor, group, "dp", op).wait()
