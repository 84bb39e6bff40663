"""What the planner counts of a rank's memory, against schedules, losses and compiled layers as they
run, and against published runs.

Legend: T tokens, V vocabulary, D d_model.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from convoy.plan import validate
from convoy.plan.hardware import load_cluster
from convoy.plan.memory import in_flight, kept_elements, loss_bytes, memory, memory_of_place
from convoy.plan.shape import ModelShape
from convoy.plan.step_time import _of_place as time_of_place
from convoy.plan.step_time import step_time
from convoy.plan.work import Program, Work
from moe import MoEConfig
from parallel import PipelineSchedule
from parallel.layout import Topology
from pretrain.model import Decoder, ModelConfig
from pretrain.parallelize.micro_batches import next_token_loss
from pretrain.parallelize.orders import make_orders
from pretrain.parallelize.schedule import place_of

MODEL = ModelConfig(
    vocab_size=512, d_model=64, num_layers=9, num_heads=4, num_kv_heads=2, d_ff=256,
    first_k_dense=2,
)  # fmt: skip
MOE = MoEConfig(d_model=64, d_ff=64, num_experts=8, top_k=2)


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def pipelined(
    schedule: PipelineSchedule, stages_per_rank: int, micro_batches: int, **options: Any
) -> Work:
    """On 4 ranks of a pipeline."""
    return Work(
        ModelShape.of(MODEL, MOE), Topology(pp=4), 64, micro_batches, 1, schedule=schedule.value,
        stages_per_rank=stages_per_rank, **options,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Micro-batches in flight.


def held_in_schedule(
    schedule: PipelineSchedule, stages_per_rank: int, micro_batches: int, group: Any
) -> dict[int, set[tuple[int, ...]]]:
    """By place: micro-batches between the forward and the backward of each stage, at every action
    of the order that the trainer runs."""
    stages = range(4 * stages_per_rank)
    first = {stage: nn.Identity() for stage in stages if place_of(stage, 4, schedule) == 0}
    orders = make_orders(
        schedule, first, num_stages=len(stages), micro_batches=micro_batches, group=group
    )
    moments = {}
    for place, actions in orders.items():
        held = {stage: 0 for stage in stages if place_of(stage, 4, schedule) == place}
        moments[place] = set()
        for action in actions:
            change = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
            if action.computation_type.name in change:
                held[action.stage_index] += change[action.computation_type.name]
            moments[place].add(tuple(held.values()))
    return moments


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "micro_batches"),
    [
        ("gpipe", 1, 6), ("gpipe", 2, 6), ("1f1b", 1, 8), ("1f1b", 1, 3), ("1f1b", 2, 16),
        ("1f1b", 3, 4), ("1f1b", 3, 8), ("1f1b", 3, 32), ("zbv", 2, 2), ("zbv", 2, 5),
        ("zbv", 2, 16), ("dualpipev", 2, 8), ("dualpipev", 2, 24),
    ],
)  # fmt: skip
def test_micro_batches_in_flight_are_those_of_the_schedule(
    schedule, stages_per_rank, micro_batches, four_ranks
):
    name = PipelineSchedule(schedule)
    work = pipelined(name, stages_per_rank, micro_batches)
    for place, moments in held_in_schedule(
        name, stages_per_rank, micro_batches, four_ranks
    ).items():
        planned = in_flight(work, place)
        # Stages of equal size, and one stage that alone is large.
        for sizes in ((1,) * stages_per_rank, *_one_large(stages_per_rank)):
            peak = max(_weighed(sizes, counts) for counts in moments)
            assert max(_weighed(sizes, counts) for counts in planned) == peak, (place, sizes)


def _weighed(sizes: tuple[int, ...], counts: tuple[int, ...]) -> int:
    return sum(size * count for size, count in zip(sizes, counts, strict=True))


def _one_large(count: int) -> list[tuple[int, ...]]:
    return [tuple(9 if i == large else 1 for i in range(count)) for large in range(count)]


def test_one_rank_holds_one_micro_batch():
    assert in_flight(Work(ModelShape.of(MODEL, MOE), Topology(), 64, 8, 1), 0) == [(1,)]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_a_pipeline_is_as_full_and_as_slow_as_its_worst_place(schedule):
    # Layers in eight stages of unequal numbers and kinds: no place stands for all others.
    cluster = load_cluster("h100")
    for layers in (9, 13, 14):
        shape = ModelShape.of(MODEL.model_copy(update={"num_layers": layers}), MOE)
        work = replace(pipelined(PipelineSchedule(schedule), 2, 32), shape=shape)
        peaks = [memory_of_place(work, place, cluster.chip).total for place in range(4)]
        assert memory(work, cluster.chip).total == max(peaks)
        seconds = [time_of_place(work, place, cluster).total for place in range(4)]
        assert step_time(work, cluster).total == max(seconds)


# ------------------------------------------------------------------------------------------------
# The loss.


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.count, self.peak = set[int](), 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on local tensors come here
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.alive:
                    self.alive.add(key)
                    self.count += size
                    weakref.finalize(storage, self._gone, key, size)
        self.peak = max(self.peak, self.count)
        return out

    def _gone(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.count -= size


T, V, D = 256, 4096, 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_loss_takes_the_planned_memory(dtype, heads):
    size = getattr(torch, dtype)
    weight_VD = torch.randn(V, D, dtype=size, requires_grad=True)
    x_BSD = torch.randn(1, T, D, dtype=size, requires_grad=True)
    targets_BS = torch.randint(V, (1, T))
    with LiveBytes() as live:
        logits = [F.linear(x_BSD, weight_VD) for _ in range(heads)]
        losses = [next_token_loss(each, targets_BS) for each in logits]
        torch.stack(losses).sum().backward()
    work = _of_loss(Topology(), dtype, num_mtp_layers=heads - 1)
    assert loss_bytes(work) == pytest.approx(live.peak, rel=0.02 if heads == 1 else 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_of_parts_of_the_vocabulary_takes_the_planned_memory(dtype, four_ranks):
    size = getattr(torch, dtype)
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    weight_VD = torch.randn(V, D, dtype=size, requires_grad=True)
    x_BSD = torch.randn(1, T, D, dtype=size, requires_grad=True)
    targets_BS = torch.randint(V, (1, T))
    with LiveBytes() as live, loss_parallel():
        logits_BSV = DTensor.from_local(F.linear(x_BSD, weight_VD), mesh, (Shard(2),))
        next_token_loss(logits_BSV, targets_BS).backward()
    work = _of_loss(Topology(tp=4), dtype, vocab_size=4 * V)
    assert loss_bytes(work) == pytest.approx(live.peak, rel=0.02)


def _of_loss(topology: Topology, dtype: str, **sizes: int) -> Work:
    shape = replace(ModelShape.of(MODEL, MOE), **({"vocab_size": V} | sizes))
    return Work(shape, topology, T, 1, 1, program=Program(dtype=dtype))


# ------------------------------------------------------------------------------------------------
# Kernels of more than one operation.


@pytest.mark.slow
def test_a_compiled_layer_keeps_the_planned_activations():
    # What a compiler keeps is decided before it makes kernels.
    torch.manual_seed(0)
    ffn = Decoder(MODEL, None).blocks[0].ffn
    assert ffn is not None
    x_BSD = torch.randn(1, T, MODEL.d_model, requires_grad=True)
    saved = {False: _saved_floats(ffn, x_BSD)}
    ffn.compile(backend="aot_eager_decomp_partition")
    saved[True] = _saved_floats(ffn, x_BSD)
    planned = {fused: _kept_of_a_dense_layer(fused) for fused in (False, True)}
    assert saved[False] - saved[True] == planned[False] - planned[True] == T * MODEL.d_ff
    # Beside the layer's input, which the planner counts as an output of the norm before it.
    assert saved[True] == T * (3 * MODEL.d_ff + MODEL.d_model)


def _kept_of_a_dense_layer(fused: bool) -> float:
    program = Program(dtype="float32", fused_elementwise=fused)
    work = Work(ModelShape.of(MODEL, None), Topology(), T, 1, 1, program=program)
    return kept_elements(work, 0, "none", "accelerator")


def _saved_floats(module: nn.Module, x_BSD: Tensor) -> int:
    """Numbers that autograd saves in a forward, weights left out."""
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            sizes[storage._cdata] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x_BSD)
    assert out.requires_grad
    return sum(sizes.values())


# ------------------------------------------------------------------------------------------------
# Published runs.


def test_published_runs_fit_the_hardware_that_they_ran_on():
    rows = {row.name: row for row in validate.compare()}
    # A reason stands where it is needed, and nowhere else.
    unfit = {name for name, row in rows.items() if not row.fits}
    assert unfit == {name for name, row in rows.items() if row.run.exceeds_memory}
    assert unfit == {
        "Llama 3 405B, 8,192 GPUs",
        "Llama 3 405B, 16,384 GPUs, long",
        "DeepSeek-V3, 2,048 GPUs",
    }
