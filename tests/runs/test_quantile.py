"""Quantile balancing in whole runs: every layout has the biases of one process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.state.names import EXPERT_BIAS
from tests.support.exact import exact_spec
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import Trained, bits_that_differ, spec_for, train

# Four micro-batches of a step, the last one short; documents with padding are in the batches.
QUANTILE: dict[str, Any] = {
    "moe": {"balancing": "quantile", "aux_loss_coeff": 0.0, "score_func": "sigmoid"},
}  # fmt: skip
# Each layer's forward runs twice, and the layers of multi-token prediction have biases too.
MORE: dict[str, Any] = {
    **QUANTILE, "model": {"num_mtp_layers": 2}, "parallel": {"memory": {"recompute": "full"}},
    "data": {"document_mask": True},
}  # fmt: skip
LAYOUTS = [
    "pp=2", "dp_replicate=2", "dp_shard=4,ep=2", "pp=2,dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2 zbv",
]  # fmt: skip
STEPS, SAVED = 4, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("quantile")))


@pytest.fixture(scope="module")
def alone(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("alone")
    return train(exact_spec(folder, data, "", **QUANTILE), STEPS)


def test_biases_are_those_of_one_process_and_are_resumed(
    alone: Trained, data: dict[str, str], tmp_path: Path
) -> None:
    bias_LE = alone.state[EXPERT_BIAS]
    assert bias_LE.std(1).min() > 1e-4, "a layer's biases did not move"
    spec = exact_spec(tmp_path, data, "dp_shard=2,ep=2", **QUANTILE)
    trained = train(spec, STEPS, save_at=SAVED)
    assert bits_that_differ(trained, alone) == []
    assert not torch.equal(trained.saved[EXPERT_BIAS], bias_LE)
    resumed = train(spec, STEPS - SAVED)
    assert resumed.losses == trained.losses[SAVED:]
    assert torch.equal(resumed.state[EXPERT_BIAS], bias_LE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bits_of_one_process(
    layout: str, data: dict[str, str], tmp_path: Path
) -> None:
    expected = train(exact_spec(tmp_path / "alone", data, "", **MORE), 3)
    trained = train(exact_spec(tmp_path / "laid out", data, layout, **MORE), 3)
    assert bits_that_differ(trained, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "tp=2,ep=2", "dp_shard=2,ep=2"])
def test_without_exact_sums_biases_differ_by_rounding_alone(
    layout: str, data: dict[str, str], tmp_path: Path
) -> None:
    """A margin that is rounded otherwise may be in the next bin."""
    sections: dict[str, Any] = {
        **QUANTILE, "batch": {"global_batch_size": 5}, "optimizer": {"eps": 1e-4},
    }  # fmt: skip
    folders = [tmp_path / "alone", tmp_path / "laid out"]
    for folder in folders:
        folder.mkdir()
    expected = train(spec_for(folders[0], data, "", **sections), 3)
    trained = train(spec_for(folders[1], data, layout, **sections), 3)
    assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(
        trained.state[EXPERT_BIAS], expected.state[EXPERT_BIAS], rtol=0, atol=1e-4
    )
