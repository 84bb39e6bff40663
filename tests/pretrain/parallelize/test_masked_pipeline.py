"""Padding and masked labels in the stages of a pipeline and in an evaluation.

Legend: B batch, S sequence, L layers, E experts.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from torch import Tensor

from convoy.preparation import prepare_corpora
from moe import MoEConfig
from parallel import ParallelDims, PipelineSchedule, Topology
from pretrain.checkpoint.resume import restore
from pretrain.data import read_batch
from pretrain.job import build_job
from pretrain.model import Decoder, ModelConfig
from pretrain.parallelize import LocalBatch, forward_backward
from pretrain.parallelize.micro_batches import mask_of
from pretrain.parallelize.pipeline import Pipeline
from pretrain.parallelize.results import routing_stats
from pretrain.runtime.ranks import start
from pretrain.spec import JobSpec
from pretrain.train.evaluate import evaluate
from tests.support.jobs import make_spec
from tests.support.ranks import run_ranks

S, VOCAB = 12, 300
MODEL = ModelConfig(vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1,
                    d_ff=24, first_k_dense=0)  # fmt: skip
MOE = MoEConfig(d_model=16, d_ff=8, num_experts=4, top_k=2, aux_loss_coeff=0.5, z_loss_coeff=0.1,
                capacity={"policy": "fixed", "capacity_factor": 1})  # fmt: skip
CPU = torch.device("cpu")


def micro_batches(*, padded: bool) -> list[Tensor]:
    """Three of [2, S + 1] token ids: all labels, half of the labels masked, and likewise with
    other tokens; ``padded`` fills up a third of some sequences."""
    torch.manual_seed(3)
    batches = list(torch.randint(1, VOCAB, (3, 2, S + 1)))
    for batch in batches[1:]:
        batch[:, 2::2] = ~batch[:, 2::2]
    if padded:
        for number, batch in enumerate(batches):
            batch[number % 2, 2 * S // 3 :] = -1
    return batches


def errors_on_rank(rank: int, padded: bool) -> dict[str, float]:
    """Of gradients and statistics of two stages, against the whole model in this process."""
    torch.manual_seed(0)
    whole = Decoder(MODEL, MOE)
    part = copy.deepcopy(whole).part(range(rank, rank + 1), first=rank == 0, last=rank == 1)
    dims = ParallelDims.build(Topology(pp=2), "cpu")
    pipeline = Pipeline({rank: part}, 2, schedule=PipelineSchedule.ONE_F_ONE_B,
                        pp_mesh=dims.pp_mesh, moe=MOE)  # fmt: skip
    local_batch, batches = LocalBatch(masked_targets=True), micro_batches(padded=padded)
    divisor = 3.0 * 2 * S
    options = {"device": CPU, "local_batch": local_batch, "reduce_once": False}
    got = pipeline.forward_backward(batches, divisor, **options)
    wanted = forward_backward(whole, batches, divisor, **options)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    errors = {name: float((p.grad - expected[name]).norm() / expected[name].norm())
              for name, p in part.named_parameters()}  # fmt: skip
    assert got.routing is not None
    assert wanted.routing is not None
    counts = got.routing.tokens_per_expert_LE[rank] - wanted.routing.tokens_per_expert_LE[rank]
    errors["rows of a step"] = float(counts.abs().sum())

    # A forward alone, as an evaluation has it.
    inputs_BS, _ = local_batch.inputs_and_targets(batches[0])
    inputs_BS, routed = inputs_BS.clamp_min(0), local_batch.routed_tokens(batches[0])
    with torch.no_grad():
        out, routing = pipeline.forward(inputs_BS, local_batch, routed=routed)
        alone = whole(inputs_BS, **mask_of(routed, CPU))
    stats = routing_stats(alone.aux, routed.tokens)
    counts = routing.tokens_per_expert_LE[rank] - stats.tokens_per_expert_LE[rank]
    errors["rows of an evaluation"] = float(counts.abs().sum())
    if rank == 1:
        real = batches[0][:, :-1] != -1
        errors["logits"] = float((out.logits - alone.logits)[real].abs().max())
    return errors


def check(padded: bool) -> None:
    for rank in run_ranks(errors_on_rank, 2, padded):
        wrong = {name: error for name, error in rank.items() if not error <= 1e-5}
        assert not wrong
        assert len(rank) > 8


def test_padding_is_no_token_in_a_pipeline():
    check(padded=True)


def test_auxiliary_losses_are_weighed_by_targets_in_a_pipeline():
    check(padded=False)


def evaluated_on_rank(rank: int, spec: JobSpec) -> tuple[list[int], int, int]:
    """The rows that each MoE layer routed in an evaluation, and the tokens and places that it
    scored."""
    job = build_job(spec, start(spec.train.timeout_seconds))
    restore(job)
    rows = [sum(counts_E) for counts_E in evaluate(job).tokens_per_expert_LE]
    (held_out,) = job.held_out.values()
    batch = read_batch(held_out, range(len(held_out)))
    lengths = [max(i for i, token in enumerate(row) if token != -1) + 1 for row in batch.tolist()]
    places = batch.shape[1] - 1
    job.runtime.close()
    return rows, sum(min(length, places) for length in lengths), places * len(batch)


def test_padding_is_no_token_in_an_evaluation(tmp_path: Path):
    (tmp_path / "text").mkdir()
    texts = [f"number {i}. " + "words and words " * (i % 9) for i in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "text" / "a.jsonl").write_text(lines)
    spec = make_spec(tmp_path, data={"packing": "best_fit", "mask_boundary_labels": True})
    prepare_corpora(spec.data, spec.model.vocab_size, lambda _: None)
    ((rows, tokens, places),) = run_ranks(evaluated_on_rank, 1, spec, group=False)
    assert spec.moe is not None
    assert tokens < places
    assert rows == [spec.moe.top_k * tokens] * 2
