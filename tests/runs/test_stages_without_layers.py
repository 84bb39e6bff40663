"""Pipeline stages that have the embedding or the head and no layer, on real ranks; and checkpoints
of runs whose layers were divided in another way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from corpus.prepare import prepare_corpus
from parallel import PipelineSchedule
from pretrain.parallelize import decoder
from pretrain.parallelize.stages import stage_layers
from tests.support.jobs import data_of, make_spec, write_corpus
from tests.support.layouts import check_gradients, relative_error, spec_for, train

STEPS = 4
# The head costs more than four layers together.
SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 4, "vocab_size": 8192},
    "moe": {"num_experts": 8, "expert_bias": True, "aux_loss_coeff": 0.02},
    "train": {"steps": 20}, "batch": {"global_batch_size": 5}, "optimizer": {"eps": 1e-4},
    "checkpoint": {"reshard_on_load": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("wide")
    write_corpus(folder / "text")
    spec = make_spec(folder, **SECTIONS)
    prepare_corpus(spec.data, spec.model.vocab_size)
    return data_of(folder)


def use_other_stages(lengths: tuple[int, ...]) -> None:
    """Divide layers as another version of Convoy might."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    stages = [range(end - count, end) for end, count in zip(ends, lengths, strict=True)]
    decoder.stage_layers = lambda *_, **__: stages  # type: ignore[attr-defined]


def test_a_costly_head_leaves_a_rank_without_layers(data, tmp_path):
    spec = spec_for(tmp_path, data, "pp=2", **SECTIONS)
    cut = partial(stage_layers, spec.model, spec.moe, seq_len=32, pp=2)
    assert [len(layers) for layers in cut()] == [4, 0]
    folded = cut(stages_per_rank=2, schedule=PipelineSchedule.ZBV)
    assert [len(layers) for layers in folded] == [0, 2, 2, 0]


@pytest.mark.parametrize(
    ("folded", "flat"),
    [
        ("pp=2 zbv", "pp=2"),
        pytest.param("pp=2,dp_shard=2,ep=2 zbv", "pp=2,tp=2,ep=2", marks=pytest.mark.slow),
        pytest.param("pp=2,dp_replicate=2 dualpipev", "pp=2,dp_shard=2", marks=pytest.mark.slow),
    ],
)
def test_stages_without_layers_train_save_and_resume(folded, flat, data, tmp_path: Path):
    (tmp_path / "alone").mkdir()
    alone = train(spec_for(tmp_path / "alone", data, "", **SECTIONS), STEPS)
    trained = train(spec_for(tmp_path, data, folded, **SECTIONS), STEPS, save_at=2)
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    assert trained.norms == pytest.approx(alone.norms, rel=1e-4)
    check_gradients(trained, alone)
    # The checkpoint is resumed with other stages, and that run's with the last stage empty.
    spec = spec_for(tmp_path, data, flat, **SECTIONS)
    other = train(spec, 1, save_at=1, first=partial(use_other_stages, (3, 1)))
    assert other.losses == pytest.approx(alone.losses[2:3], rel=1e-5)
    resumed = train(spec, 1)
    assert resumed.losses == pytest.approx(alone.losses[3:], rel=1e-5)
    assert resumed.state.keys() == alone.state.keys()
    for name, expected in alone.state.items():
        if name.startswith("model/"):
            assert relative_error(resumed.state[name], expected) <= 1e-4, name
