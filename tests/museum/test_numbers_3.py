"""Wrong numbers under expert, tensor and data parallelism.

Sequences, GEMMs and layers over several ranks.

Legend: B batch, W tokens of a full sequence, S tokens of a sequence on one rank.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from parallel import ParallelDims, Topology
from pretrain.parallelize import LocalBatch
from tests.museum.cases import Edit, case
from tests.museum.shared_numbers import (
    ROUTER,
    Step,
    W,
    alone,
    batch_of,
    errors,
    errors_of_ranks,
    on_ranks,
    plain_decoder,
    router_on_rank,
)
from tests.support.ranks import run_ranks

BATCHES = ((batch_of([16, 16]), batch_of([16, 16], 1)),)


@case(
    "pytorch/torchtitan#1805",
    "A parameter of tensor parallelism was used as a local tensor without saying that its gradient "
    "is a partial sum, so that a reduction in the backward was missing.",
    Edit(
        "parallel/apply/tensor_parallel.py",
        "return parameter.to_local(grad_placements=[Partial()])",
        "return parameter.to_local()",
    ),
)
def test_norms_learn_from_the_tokens_of_all_tensor_parallel_ranks():
    """Weights of norms, of which each rank sees some tokens, have the gradient over all tokens."""
    step = Step("tp=2", BATCHES)
    expected = alone(step)
    for outcome in on_ranks(step):
        wrong = errors(outcome, expected)
        assert {name: value for name, value in wrong.items() if "norm" in name} == {}


@case(
    "pytorch/torchtitan#4054",
    "Under tensor parallelism without expert parallelism the gradient below the experts was one "
    "rank's share, in every layer beneath, while losses looked normal.",
    Edit(
        "parallel/comm/collectives.py",
        "return _start(x_ND, _gather(group, of), _sum_blocks(group, of))",
        "own = torch.arange(len(x_ND) * group.size()) // len(x_ND) == group.rank()\n"
        "    own = own.view(-1, *[1] * (x_ND.ndim - 1))\n"
        "    send = _sum_blocks(group, of)\n"
        "    return _start(x_ND, _gather(group, of), lambda grad: send(grad * own))",
    ),
)
def test_gradients_below_a_layer_are_summed_over_tensor_parallel_ranks():
    """Every parameter below layers with sharded GEMMs has the gradient of one process."""
    step = Step("tp=2", BATCHES)
    assert errors_of_ranks(step) == [{}] * 2


@case(
    "NVIDIA/Megatron-LM#599",
    "Each rank of tensor parallelism drew a router of its own, so that copies of one router chose "
    "other experts and could not be exported.",
    Edit("pretrain/model/init.py", 'f"{seed}/{name}"', 'f"{torch.initial_seed()}/{name}"'),
)
def test_tensor_parallel_ranks_begin_with_one_router():
    """Ranks whose random generators differ begin with the router of one process."""
    step = Step("tp=2", BATCHES)
    first, second = run_ranks(partial(router_on_rank, step), 2)
    assert torch.equal(first, second)
    assert torch.equal(first, plain_decoder(step).get_parameter(ROUTER))


@case(
    "NVIDIA/Megatron-LM#906",
    "With context parallelism the loss was multiplied by the number of ranks of a sequence while "
    "gradients were not divided by it, so that gradients were too large.",
    Edit(
        "pretrain/parallelize/micro_batches.py",
        "loss = nll / divisor",
        "loss = nll / divisor * (local_batch.dims.cp_mesh.size() if local_batch.dims else 1)",
    ),
)
def test_gradients_do_not_grow_with_context_parallelism():
    """Two ranks that share sequences have the gradients of one process."""
    step = Step("cp=2", BATCHES)
    assert errors_of_ranks(step) == [{}] * 2


@case(
    "NVIDIA/Megatron-LM#3943",
    "With context parallelism the loss of multi-token prediction was divided by the number of "
    "ranks of a sequence once too often.",
    Edit(
        "pretrain/parallelize/micro_batches.py",
        "loss = loss + weight / divisor * mtp_nll",
        "loss = loss + weight / divisor / (local_batch.dims.cp_mesh.size()) * mtp_nll",
    ),
)
def test_multi_token_prediction_weighs_as_much_under_context_parallelism():
    """A layer of multi-token prediction has the same gradient on one rank and on two."""
    one_rank, two_ranks = (Step(layout, BATCHES, mtp_weight=0.5) for layout in ("", "cp=2"))
    (expected,) = on_ranks(one_rank)
    assert float(expected.gradients["mtp.layers.0.projection.weight"].norm()) > 0
    assert [errors(outcome, expected) for outcome in on_ranks(two_ranks)] == [{}] * 2


def _pairs_on_rank(rank: int) -> set[tuple[int, int]]:
    dims = ParallelDims.build(Topology(cp=2), "cpu")
    inputs_BS, targets_BS = LocalBatch(dims).inputs_and_targets(torch.arange(W + 1).unsqueeze(0))
    return set(zip(inputs_BS[0].tolist(), targets_BS[0].tolist(), strict=True))


@case(
    "huggingface/transformers#36607",
    "Targets were shifted after a sequence had been cut over ranks, so that the last token of each "
    "cut had no target.",
    Edit(
        "pretrain/parallelize/micro_batches.py",
        "return local_sequence(inputs_BS, mesh), local_sequence(targets_BS, mesh)",
        "cut_BS = local_sequence(inputs_BS, mesh)\n"
        "        return cut_BS, torch.cat((cut_BS[:, 1:], torch.full_like(cut_BS[:, :1], -1)), 1)",
    ),
)
def test_a_token_before_a_cut_has_the_token_after_it_as_target():
    """Ranks that share a sequence have each token once, with the token after it as target."""
    first, second = run_ranks(_pairs_on_rank, 2)
    assert len(first) == len(second) == W // 2
    assert first | second == {(i, i + 1) for i in range(W)}


@case(
    "pytorch/torchtitan#596",
    "With pipeline parallelism each stage clipped by the norm of its own layers, so that stages "
    "were clipped by different factors.",
    Edit(
        "parallel/comm/gradients.py",
        "all_reduce(square).wait()",
        "all_reduce(square, dims.stage_mesh.get_group()).wait()",
    ),
)
def test_stages_of_a_pipeline_clip_by_one_norm():
    """Two stages report the gradient norm of all layers, and clip by it."""
    step = Step("pp=2", BATCHES, max_norm=0.5)
    expected = alone(step)
    for outcome in on_ranks(step):
        assert outcome.norm == pytest.approx(expected.norm, rel=1e-5)
        assert errors(outcome, expected) == {}


@case(
    "pytorch/torchtitan#2972",
    "A pipeline ran the backward of the summed loss and divided by the step's targets afterwards, "
    "for the log alone: gradients were thousands of times those without a pipeline.",
    Edit("pretrain/parallelize/pipeline.py", "root = nll / self.divisor", "root = nll"),
)
def test_a_pipeline_has_the_gradients_of_one_process():
    """Gradients of two stages with several micro-batches are those of one process."""
    step = Step("pp=2", BATCHES)
    assert errors_of_ranks(step) == [{}] * 2
