"""Losses that depend on how a batch is divided.

Ranks and micro-batches with unequal numbers of targets, masks, padding and packing.

Legend: B batch, S tokens of a sequence, V vocab.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallel import Documents
from pretrain.parallelize import LocalBatch, forward_backward, next_token_loss
from tests.museum.cases import Edit, case
from tests.museum.shared_numbers import (
    Step,
    W,
    alone,
    batch_of,
    errors,
    errors_of_ranks,
    on_ranks,
    plain_decoder,
)
from tests.museum.shared_runs import run
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import spec_for

FILE = "pretrain/parallelize/micro_batches.py"
MEAN = "loss = nll / max(local_batch.count_targets(batch, targets_BS), 1)"


@case(
    "pytorch/torchtitan#1842",
    "Each rank divided its loss by its own targets and gradients were averaged, so that targets on "
    "a rank with few of them weighed more.",
    Edit(FILE, "loss = nll / divisor", f"{MEAN} / 2"),
)
def test_a_target_weighs_the_same_on_a_rank_with_few_targets():
    """Two ranks, one with 3 targets and one with 32, have the gradients of 35 equal targets."""
    step = Step("dp_shard=2", ((batch_of([3, 0]),), (batch_of([16, 16], 1),)))
    assert errors_of_ranks(step) == [{}] * 2


@case(
    "PrimeIntellect-ai/prime-rl#1957",
    "A sequence's prompt has no targets, and most of it is on one of the ranks that share the "
    "sequence: that rank's few targets weighed more than the others'.",
    Edit(FILE, "loss = nll / divisor", f"{MEAN} / 2"),
)
def test_targets_weigh_the_same_where_a_prompt_is_on_one_rank():
    """Ranks that share sequences with long prompts have the gradients of one process."""
    step = Step("cp=2", ((batch_of([5]), batch_of([16], 1)),))
    outcomes, expected = on_ranks(step), alone(step)
    assert outcomes[0].targets != outcomes[1].targets
    assert [errors(outcome, expected) for outcome in outcomes] == [{}] * 2


def _accumulated(
    batches: list[torch.Tensor], divisor: int
) -> tuple[dict[str, torch.Tensor], float]:
    model = plain_decoder(Step("", ((),)))
    local_batch = LocalBatch(masked_targets=True)
    result = forward_backward(
        model, batches, divisor, device=torch.device("cpu"), local_batch=local_batch
    )
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, float(result.loss_sum) / result.target_tokens


@case(
    "verl-project/verl#5625",
    "Micro-batches were weighted by their samples while each had been divided by its own tokens, "
    "so that the accumulated gradient was not that of the batch.",
    Edit(
        FILE,
        "loss = nll / divisor",
        f"{MEAN} * len(batch) / sum(len(each) for each in micro_batches)",
    ),
)
def test_micro_batches_with_unequal_targets_accumulate_to_the_batch():
    """Three micro-batches with 1, 7 and 32 targets give the gradients of the batch of all four
    sequences."""
    batches = [batch_of([1]), batch_of([7], 1), batch_of([16, 16], 2)]
    gradients, _ = _accumulated(batches, 40)
    expected, _ = _accumulated([torch.cat(batches)], 40)
    reference = alone(Step("", (tuple(batches),)))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, reference.gradients[name], rtol=1e-4, atol=1e-6)


@case(
    "allenai/allennlp#4706",
    "With gradient accumulation the reported loss was that of the last micro-batch, divided by the "
    "number of micro-batches.",
    Edit(FILE, "loss_sum += on_loss_grid(nll.detach())", "loss_sum = on_loss_grid(nll.detach())"),
)
def test_the_reported_loss_is_that_of_all_micro_batches():
    """The loss that a step of three micro-batches reports is the mean over all of their targets."""
    batches = [batch_of([1]), batch_of([7], 1), batch_of([16, 16], 2)]
    expected = alone(Step("", (tuple(batches),)))
    _, mean = _accumulated(batches, 40)
    assert mean == pytest.approx(expected.loss / 40, rel=1e-5)


@case(
    "ml-explore/mlx-lm#1855",
    "The perplexity of short documents in a batch had the probability of padding in it, so that "
    "the batch size changed the perplexity of a model.",
    Edit(FILE, "targets_BS = targets_BS.clamp_min(-1)", "targets_BS = targets_BS.clamp_min(0)"),
)
def test_a_short_document_scores_the_same_beside_a_long_one():
    """A padded sequence in a batch has the loss that its tokens have by themselves."""
    model = plain_decoder(Step("", ((),)))
    long = batch_of([W])
    short = batch_of([W], 1)[:, :6]
    batch = torch.cat((long, F.pad(short, (0, W + 1 - 6), value=-1)))
    inputs_BS, targets_BS = LocalBatch(masked_targets=True).inputs_and_targets(batch)
    together = next_token_loss(model(inputs_BS).logits[1:], targets_BS[1:])
    logits = model(torch.where(short < 0, ~short, short)[:, :-1]).logits[0]
    expected = F.cross_entropy(logits, short[0, 1:], ignore_index=-1, reduction="sum")
    assert float(together.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


@case(
    "huggingface/nanoVLM#201",
    "Samples packed into one sequence had positions that went on from the sample before, and "
    "attended to it, so that a sample's logits depended on its neighbour.",
    Edit(
        "parallel/apply/document_mask.py",
        "return same.tril(first)",
        "return torch.ones_like(same).tril(first)",
    ),
)
def test_a_packed_document_has_the_logits_that_it_has_alone():
    """The logits of a document do not depend on the document before it in the sequence."""
    model = plain_decoder(Step("", ((),)))
    end = 7
    first, second = torch.randint(8, 250, (2, 6))
    first[-1] = end
    packed = torch.cat((first, second)).unsqueeze(0)
    logits_SV = model(packed, None, Documents.ended_by(end, packed)).logits[0]
    torch.testing.assert_close(logits_SV[6:], model(second.unsqueeze(0)).logits[0])
    torch.testing.assert_close(logits_SV[:6], model(first.unsqueeze(0)).logits[0])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("losses")))


@case(
    "huggingface/transformers#24839",
    "The loss of an evaluation was the mean over batches, whatever their number of tokens, and so "
    "it changed with the batch size.",
    Edit(
        "pretrain/train/evaluate.py",
        "[float(on_loss_grid(nll)), real.numel(), int(lengths[real].sum())]",
        "[float(on_loss_grid(nll)) / real.numel(), 1, int(lengths[real].sum())]",
    ),
)
def test_the_loss_of_an_evaluation_does_not_depend_on_the_batch(data, tmp_path):
    """Held-out sequences have one loss in batches of 2, and of 5, of which the last has fewer."""
    losses = []
    for size in (2, 5):
        folder = tmp_path / str(size)
        folder.mkdir()
        batch = {"global_batch_size": 10, "micro_batch_size": size}
        losses.append(run(spec_for(folder, data, "", batch=batch), 0, evaluates=True).evaluated)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
