"""Multi-token prediction: its tokens, targets, weights and loss, in one process and laid out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

import ckpt
from convoy.preparation import prepare_corpora
from corpus.prepare.prepare import prepare_corpus
from parallel import Topology
from pretrain.checkpoint.resume import restore
from pretrain.errors import InputError
from pretrain.job import build_job
from pretrain.model.config import MTPConfig, MTPStage
from pretrain.model.decoder import Decoder
from pretrain.observe import IntervalEnded
from pretrain.observe.prometheus import Metrics
from pretrain.parallelize.micro_batches import LocalBatch, forward_backward
from pretrain.parallelize.mtp import MTPLoss, shifted
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.spec.read import resolve_spec
from pretrain.train.evaluate import evaluate
from tests.runs.test_runs import launch
from tests.support.jobs import data_of, events, make_spec, write_corpus, write_spec
from tests.support.layouts import check_gradients, spec_for, train
from tests.support.ranks import run_ranks

SLOW = pytest.mark.slow
CPU = torch.device("cpu")
END = 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Short documents of many lengths, so that ranks and layers have unequal numbers of targets."""
    folder = tmp_path_factory.mktemp("mtp")
    write_corpus(folder / "whole")
    (folder / "text").mkdir()
    for path in sorted((folder / "whole").iterdir()):
        text, start = path.read_bytes(), 0
        for number in range(1, 12):
            stop = start + 17 * (number * number % 13 + 1)
            (folder / "text" / f"{path.stem}-{number}.py").write_bytes(text[start:stop])
            start = stop
    spec = make_spec(folder)
    prepare_corpus(spec.data, spec.model.vocab_size, lambda _: None)
    return data_of(folder)


# ------------------------------------------------------------------------------------------------
# Tokens, targets and weights.

# Few different tokens, so that documents are short; -1 is padding, below it are complements.
ROWS = st.lists(st.lists(st.integers(-5, 4), min_size=7, max_size=7), max_size=3)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(1, 8), st.booleans())
def test_targets_are_as_far_ahead_as_the_layer_says_and_of_the_same_document(rows, by, ends):
    end = 2 if ends else None
    batch = torch.tensor(rows, dtype=torch.int64).view(-1, 7)
    part = LocalBatch(end_token=end, masked_targets=True, num_mtp_layers=by)
    inputs, targets = part.training_inputs(batch)
    inputs, targets_TBS = inputs.view(by + 1, -1, 6), torch.stack(targets)
    for b, row in enumerate(rows):
        tokens = [~t if t < -1 else t for t in row]  # padding stays
        for i in range(6):
            here = row[i + by] if i + by < 7 else -1
            assert inputs[by, b, i] == (~here if here < 0 else here)
            target = row[i + by + 1] if i + by + 1 < 7 else -1
            ended = end is not None and end in tokens[i : i + by + 1]
            assert targets_TBS[by, b, i] == (-1 if ended else max(target, -1))


def test_without_masks_all_tokens_but_the_last_ones_are_targets():
    batch = torch.arange(1, 12).view(1, 11)
    part = LocalBatch(num_mtp_layers=3)
    assert part.count_all_targets(batch) == [10, 9, 8, 7]
    assert shifted(batch, 2, None).tolist() == [[*range(3, 12), -1, -1]]


def test_the_weight_changes_with_the_tokens_of_the_run():
    config = MTPConfig(stages=[MTPStage(from_tokens=100, loss_weight=0.1)])
    assert [config.weight_at(n) for n in (0, 99, 100, 101)] == [0.3, 0.3, 0.1, 0.1]
    with pytest.raises(ValidationError, match=r"mtp.stages.from_tokens \(5\) must be above"):
        MTPConfig(stages=[MTPStage(from_tokens=n, loss_weight=0.1) for n in (5, 5)])


def test_a_layer_without_targets_has_no_weight():
    assert MTPLoss.of(0.3, [10, 5, 0]).weights == pytest.approx((0.3 / 2 * 10 / 5, 0.0))


def test_a_weight_without_layers_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"mtp.loss_weight \(0.7\) and mtp.stages must be"):
        make_spec(tmp_path, mtp={"loss_weight": 0.7})
    saved = make_spec(tmp_path).as_dict()
    assert resolve_spec(saved, "a saved spec").as_dict() == saved


def test_a_layer_that_could_have_no_target_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"num_mtp_layers \(4\) must be less than data.seq_len \(4"
    ):
        make_spec(tmp_path, model={"num_mtp_layers": 4}, data={"seq_len": 4})


# ------------------------------------------------------------------------------------------------
# The loss of one process, by the definition.


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_that_of_the_mean_losses(tied: bool, tmp_path: Path):
    model = {"num_mtp_layers": 2, "tie_embeddings": tied}
    spec = make_spec(tmp_path, model=model, moe=None)
    torch.manual_seed(3)
    decoder = Decoder(spec.model, None)
    batch = torch.randint(0, 12, (5, 33))  # token 0 ends a document: every twelfth
    part = LocalBatch(end_token=END, num_mtp_layers=2)
    counts = part.count_all_targets(batch)
    mtp = MTPLoss.of(0.4, counts)
    result = forward_backward(
        decoder, [batch[:2], batch[2:], batch[:0]], counts[0], device=CPU, local_batch=part, mtp=mtp
    )
    made = {name: p.grad.clone() for name, p in decoder.named_parameters()}
    decoder.zero_grad()

    inputs, _ = part.training_inputs(batch)
    out = decoder(inputs, None, part.documents(batch[:, :-1]), 2)
    logs = [each.log_softmax(-1) for each in (out.logits, *out.mtp_logits)]
    terms: list[list[torch.Tensor]] = [[], [], []]
    for b, row in enumerate(batch.tolist()):
        for i in range(32):
            for k in range(3):
                whole = i + k + 1 <= 32 and (k == 0 or END not in row[i : i + k + 1])
                if whole:
                    terms[k].append(-logs[k][b, i, row[i + k + 1]])
    assert [len(each) for each in terms] == counts
    assert counts[2] < counts[1] < counts[0] == 160
    means = [torch.stack(each).mean() for each in terms]
    (means[0] + 0.4 * (means[1] + means[2]) / 2).backward()
    for name, parameter in decoder.named_parameters():
        assert torch.allclose(made[name], parameter.grad, rtol=1e-4, atol=1e-7), name
    sums = [float(mean.detach()) * count for mean, count in zip(means, counts, strict=True)]
    assert float(result.loss_sum) == pytest.approx(sums[0], rel=1e-5)
    assert result.mtp_loss_sums_K.tolist() == pytest.approx(sums[1:], rel=1e-5)


def test_a_layer_sees_no_token_after_its_own_and_the_decoder_none_of_the_layer(tmp_path: Path):
    """Token i + k is the last that the k-th layer's logits at i depend on."""
    spec = make_spec(tmp_path, model={"num_mtp_layers": 2})
    torch.manual_seed(0)
    decoder = Decoder(spec.model, spec.moe).eval()
    part = LocalBatch(num_mtp_layers=2)
    batch = torch.randint(0, 300, (1, 33))
    changed = batch.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 300
    with torch.no_grad():
        one, other = (decoder(part.training_inputs(each)[0], depth=2) for each in (batch, changed))
        alone = decoder(batch[:, :-1]).logits
    assert torch.equal(one.logits, alone)
    for k, (a, b) in enumerate(
        zip((one.logits, *one.mtp_logits), (other.logits, *other.mtp_logits), strict=True)
    ):
        differ = (a != b).any(-1)[0].nonzero().flatten()
        assert differ[0] == 20 - k


# ------------------------------------------------------------------------------------------------
# Layouts, each against one process.

MTP: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 4, "num_mtp_layers": 2},
    "moe": {
        "num_experts": 8, "expert_bias": True, "num_shared_experts": 1, "z_loss_coeff": 0.01,
        "aux_loss_coeff": 0.02, "seq_aux_loss_coeff": 0.02,
        "capacity": {"policy": "fixed", "capacity_factor": 4.0},
    },
    "data": {"document_mask": True},
    "train": {"steps": 20}, "batch": {"global_batch_size": 5},
    "optimizer": {"eps": 1e-4},
}  # fmt: skip
LAYOUTS = [
    "dp_shard=2,ep=2", "pp=2",
    *(
        pytest.param(layout, marks=SLOW)
        for layout in (
            "cp=2", "tp=2", "pp=2 zbv", "dp_shard=2", "dp_replicate=2", "pp=2,dp_shard=2,ep=2",
            "pp=2 dualpipev", "pp=2,tp=2", "pp=2,cp=2", "cp=2,tp=2,ep=2", "pp=4",
            "dp_replicate=2,dp_shard=2,ep=2", "pp=2,tp=2,ep=2 zbv", "pp=3,dp_replicate=2",
            "dp_shard=2,cp=2,tp=2,ep=4", "pp=2,dp_shard=2,ep=2 dualpipev",
        )
    ),
]  # fmt: skip
STEPS = 4


def laid_out(folder: Path, data: dict[str, str], layout: str, /, **sections: Any) -> JobSpec:
    """The spec of ``MTP`` with a layout and other sections."""
    s = {**MTP, **sections}
    return spec_for(folder, {**data, **s.pop("data")}, layout, **s)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> Any:
    return train(laid_out(tmp_path_factory.mktemp("alone"), data, ""), STEPS)


def check(trained: Any, alone: Any, steps: int = STEPS) -> None:
    assert trained.losses == pytest.approx(alone.losses[:steps], rel=1e-5)
    if steps == STEPS:
        assert trained.mtp_losses == pytest.approx(alone.mtp_losses, rel=1e-5)
    assert any(name.startswith("mtp.layers.1.moe.experts") for name in alone.gradients)
    check_gradients(trained, alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process_does(layout: str, alone, data, tmp_path):
    check(train(laid_out(tmp_path, data, layout), STEPS), alone)


@SLOW
@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("pp=2", {"pipeline": {"schedule": "gpipe"}}),
        ("pp=2", {"pipeline": {"stages_per_rank": 2}, "memory": {"recompute": "full"}}),
        ("dp_shard=2,ep=2", {"memory": {"zero_stage": 1}}),
        ("dp_replicate=2,dp_shard=2", {"memory": {"zero_stage": 2}}),
        ("tp=2,cp=2", {"memory": {"recompute": "selective"}}),
        ("pp=2,dp_shard=2,ep=2 zbv", {"memory": {"zero_stage": 1, "recompute": "full"}}),
    ],
)
def test_schedules_and_memory_options_change_nothing(layout, parallel, alone, data, tmp_path):
    check(train(laid_out(tmp_path, data, layout, parallel=parallel), 2), alone, steps=2)


@SLOW
def test_gradients_are_verified_with_the_weights_of_the_whole_step(alone, data, tmp_path):
    """A check computes another replica's micro-batches: with weights of its own targets its
    gradients would have other bits."""
    spec = laid_out(tmp_path, data, "dp_replicate=2", verify={"gradients_interval_steps": 1})
    trained = train(spec, 2)
    check(trained, alone, steps=2)
    assert trained.progress.verified_step == 2


PACKED = {"data": {"packing": "best_fit", "mask_boundary_labels": True}}


def balanced_over(scope: str) -> dict[str, Any]:
    return {"moe": {"num_experts": 8, "aux_loss_coeff": 0.1, "aux_loss_scope": scope}}


@SLOW
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("pp=2,cp=2", PACKED), ("dp_shard=2,ep=2", PACKED), ("dp_replicate=2,tp=2", PACKED),
        # With data parallelism the step so far is another set of tokens.
        ("pp=2,cp=2", balanced_over("global_batch")), ("tp=2,ep=2", balanced_over("global_batch")),
        ("pp=2,cp=2", balanced_over("previous_step")),
        ("dp_shard=2,ep=2", balanced_over("previous_step")),
        ("pp=2,dp_shard=2", {"moe": None, "model": {"num_layers": 2, "num_mtp_layers": 1}}),
    ],
)  # fmt: skip
def test_other_data_and_losses_too(layout, changes, data, tmp_path):
    if "data" in changes:
        data = {**data, "path": str(tmp_path / "corpus")}
    spec = laid_out(tmp_path, data, "", **changes)
    prepare_corpora(spec.data, spec.model.vocab_size, lambda _: None)
    expected = train(spec, 2)
    trained = train(laid_out(tmp_path, data, layout, **changes), 2)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    assert trained.mtp_losses == pytest.approx(expected.mtp_losses, rel=1e-5)
    check_gradients(trained, expected)


# ------------------------------------------------------------------------------------------------
# Whole runs.


@SLOW
def test_a_run_learns_tells_and_resumes_only_as_deep_as_it_was(data, tmp_path):
    sections = {"data": data, "model": {"num_mtp_layers": 1}, "optimizer": {"lr": 0.01}}
    train_section = {"steps": 30, "log_interval_steps": 10, "timeout_seconds": 60.0}
    checkpoint = {"interval_steps": 15}
    spec = write_spec(tmp_path, train=train_section, checkpoint=checkpoint, **sections)
    code, out, err = launch(spec, 1)
    assert code == 0, err
    lines = events(tmp_path / "run", "interval")
    first, *_, last = [line["mtp_losses"][0] for line in lines]
    assert last < first - 0.5
    assert f"mtp1 {last:.4f}" in out
    assert len(lines[-1]["layer_imbalances"]) == 3, "two MoE layers and one of the prediction"
    ((evaluated),) = [event for event in events(tmp_path / "run", "eval") if event["whole"]]
    assert evaluated["bits_per_byte"] < 8
    manifest = ckpt.read_manifest(tmp_path / "run/checkpoints")
    arrays = {key.split("/c.")[0] for key in manifest.objects if "/c." in key}
    names = [name for name in arrays if "model/mtp/layers/moe/experts/w_gate" in name]
    assert names
    code, out, err = launch(spec, 1, "model.num_mtp_layers=2", "train.steps=31")
    assert code == 2
    assert "model.num_mtp_layers (2) must be as in the checkpoint of step 30" in err
    code, out, err = launch(spec, 2, "train.steps=32", "parallel.dp_shard=2", "parallel.ep=2",
                            "checkpoint.reshard_on_load=true")  # fmt: skip
    assert code == 0, err
    assert "resuming after step 30" in out


@SLOW
def test_an_evaluation_has_no_multi_token_prediction(data, tmp_path):
    """Equal weights of the decoder, with and without the layers, have equal results."""
    plain = spec_for(tmp_path, data, "pp=2")
    deep = spec_for(tmp_path, data, "pp=2", model={"num_mtp_layers": 1})
    one, other = (run_ranks(partial(evaluation_on_rank, each), 2, group=False)[0]
                  for each in (plain, deep))  # fmt: skip
    assert one == other


def evaluation_on_rank(spec: JobSpec, rank: int) -> Any:
    runtime = start(spec.train.timeout_seconds)
    job = build_job(spec, runtime)
    restore(job)
    result = evaluate(job, 8)
    runtime.close()
    return result.loss, result.tokens_per_expert_LE


def test_metrics_have_the_loss_of_each_depth_and_the_layer_after_the_last(tmp_path):
    spec = make_spec(tmp_path, model={"num_mtp_layers": 2})
    assert spec.model.moe_layers == [1, 2, 3, 4]
    registry = CollectorRegistry()
    metrics = Metrics(registry, spec, Topology(), "1")
    metrics(IntervalEnded(step=1, loss=3.0, lr=0.1, grad_norm=1.0, tokens_per_second=1.0, mfu=0.1,
                          seconds=1.0, communication_seconds={}, exposed_seconds={},
                          mtp_losses=[4.0, 4.5]))  # fmt: skip
    assert registry.get_sample_value("convoy_mtp_loss", {"depth": "1"}) == 4.0
    assert registry.get_sample_value("convoy_mtp_loss", {"depth": "2"}) == 4.5
