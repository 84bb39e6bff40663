"""Wrong numbers under expert, tensor and data parallelism.

Norms, and sums of gradients over ranks.
"""

from __future__ import annotations

import pytest

from tests.museum.cases import Edit, case
from tests.museum.shared_numbers import (
    EXPERTS,
    ROUTER,
    Step,
    alone,
    batch_of,
    error,
    errors,
    errors_of_ranks,
    on_ranks,
)

TWO = ((batch_of([16, 16]),), (batch_of([16, 16], 1),))
TOGETHER = (TWO[0] + TWO[1],)
"""The batches of two data-parallel ranks, as those of one."""


@case(
    "NVIDIA-NeMo/Automodel#3816",
    "Each group of expert-parallel ranks clipped by a norm of its own, so that slices of one dense "
    "matrix were scaled by factors up to ten times apart.",
    Edit(
        "parallel/comm/gradients.py",
        "all_reduce(square).wait()",
        "all_reduce(square, dims.efsdp_mesh.get_group()).wait()",
    ),
)
def test_slices_of_a_dense_matrix_are_clipped_by_one_factor():
    """The slices that two ranks hold of each dense matrix are clipped as one process clips it."""
    step = Step("dp_shard=2,ep=2", TWO, max_norm=0.5)
    expected = alone(step)
    assert expected.norm > step.max_norm
    assert [errors(outcome, expected) for outcome in on_ranks(step)] == [{}] * 2


@case(
    "NVIDIA/Megatron-LM#5916",
    "With expert and tensor parallelism together the gradient norm left out the experts of some "
    "ranks, so that gradients were clipped less than asked for.",
    Edit(
        "parallel/comm/gradients.py",
        "if parameter.grad is not None:",
        "if parameter.grad is not None and (\n"
        "            dims is None or dims.tp_mesh.get_local_rank() == 0 or parameter.ndim < 3\n"
        "        ):",
    ),
)
def test_the_norm_has_the_experts_of_all_tensor_parallel_ranks():
    """Two ranks that share GEMMs and experts report the gradient norm of one process."""
    step = Step("tp=2,ep=2", TOGETHER)
    norms = [outcome.norm for outcome in on_ranks(step)]
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(alone(step).norm, rel=1e-5)


@case(
    "NVIDIA-NeMo/Automodel#3135",
    "The mesh of a sharded mixture-of-experts model lost its replica axis, so that gradients were "
    "not summed over replicas and the replicas drifted apart.",
    Edit("parallel/apply/gradient_sums.py", "self._sum(reduced, self.group)", "pass"),
)
def test_replicas_of_sharded_experts_have_equal_gradients():
    """Both replicas of a model that shards its experts have the gradients of all four ranks."""
    batches = (*TWO, (batch_of([9, 3], 2),), (batch_of([1]),))
    step = Step("dp_replicate=2,dp_shard=2,ep=2", batches)
    assert errors_of_ranks(step) == [{}] * 4


@case(
    "deepspeedai/DeepSpeed#6545",
    "Gradients of experts were averaged over the expert-data-parallel ranks alone, and so were as "
    "many times too large as there were expert-parallel ranks.",
    Edit(
        "parallel/apply/gradient_sums.py",
        "fsdp.set_gradient_divide_factor(1.0)",
        "fsdp.set_gradient_divide_factor(float(mesh.size()))",
    ),
)
def test_gradients_of_experts_do_not_grow_with_expert_parallelism():
    """Experts over two ranks have the gradients, beside the dense ones, of experts on one rank."""
    step = Step("dp_shard=2,ep=2", TWO)
    expected = alone(step).gradients
    dense = "layers.0.ffn.w_up.weight"
    for outcome in on_ranks(step):
        ratio = outcome.gradients[EXPERTS].norm() / outcome.gradients[dense].norm()
        wanted = expected[EXPERTS].norm() / expected[dense].norm()
        assert float(ratio) == pytest.approx(float(wanted), rel=1e-4)


@case(
    "pytorch/torchtitan#2387",
    "Under tensor parallelism the router's gradient was not summed over the ranks that route "
    "other tokens, and routers that should be copies differed after one step.",
    Edit(
        "parallel/apply/fsdp.py",
        "beside = dims.fsdp_tp_mesh if tp else dims.fsdp_mesh",
        "beside = dims.fsdp_mesh",
    ),
    Edit(
        "pretrain/parallelize/layouts.py",
        "if topology.tp > 1 and (tp_dim is None or name in of_moe):",
        "if topology.tp > 9 and name in of_moe:",
    ),
)
def test_the_router_learns_from_the_tokens_of_all_tensor_parallel_ranks():
    """Both ranks that share GEMMs have the router's gradient over all tokens."""
    step = Step("tp=2", TOGETHER)
    expected = alone(step).gradients[ROUTER]
    for outcome in on_ranks(step):
        assert error(outcome.gradients[ROUTER], expected) < 1e-4


@case(
    "NVIDIA/Megatron-LM#7186",
    "With replicas of a sharded model and several micro-batches, only the last micro-batch's "
    "gradient reached the optimizer.",
    Edit("parallel/apply/gradient_sums.py", "reduced += before", "pass"),
)
def test_replicas_sum_the_gradients_of_all_micro_batches():
    """Two replicas with three micro-batches have the gradients of all six."""
    parts = tuple(tuple(batch_of([16], 3 * rank + i) for i in range(3)) for rank in range(2))
    step = Step("dp_replicate=2", parts)
    assert errors_of_ranks(step) == [{}] * 2
