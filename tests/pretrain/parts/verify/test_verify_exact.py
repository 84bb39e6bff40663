"""``[verify]`` with ``train.exact``: one micro-batch of another rank, and digests of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretrain.train.verify import _Rotation
from tests.pretrain.parts.verify.test_verify import (
    break_gradients,
    break_parameter,
    events,
    fingerprints,
    launch,
    losses,
    spec_of,
)
from tests.support.jobs import data_of, prepare_job


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def exact_of(folder: Path, text: Path, parallel: dict[str, int], **sections: Any) -> Path:
    """As spec_of; two micro-batches on each of two ranks, or one on each of four."""
    every = {"gradients_interval_steps": 2, "parameters_interval_steps": 0}
    return spec_of(folder, text, 1, parallel=parallel, moe={"ffn_bias": True},
                   **{"train": {"exact": True, "steps": 4, "timeout_seconds": 60.0},
                      "verify": every} | sections)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"dp_shard": 2}),
        (2, {"dp_shard": 2, "ep": 2}),
        (4, {"dp_shard": 4, "ep": 2}),
        (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
        (4, {"dp_shard": 2, "tp": 2, "ep": 2}),
        (4, {"dp_replicate": 2, "cp": 2, "ep": 2}),
    ],
)
def test_a_micro_batch_computed_elsewhere_has_its_bits(
    world: int, parallel: dict[str, int], text: Path, tmp_path: Path
) -> None:
    data = {**data_of(text), "seq_len": 128}
    spec = exact_of(tmp_path, text, parallel, data=data)
    without, checked = tmp_path / "without", tmp_path / "checked"
    assert launch(spec, world, None, f"run_dir={checked}") == (0, "")
    off = "verify.gradients_interval_steps=0"
    assert launch(spec, world, None, f"run_dir={without}", off)[0] == 0
    assert losses(without) == losses(checked)
    assert fingerprints(without) == fingerprints(checked)
    assert [one["step"] for one in events(checked, "verified")] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel", "times", "ranks", "certain"),
    [
        (2, {"dp_shard": 2}, 1, [1], True),
        (2, {"dp_shard": 2}, 1000, [0, 1], False),
        (4, {"dp_shard": 4}, 1000, [1], True),
    ],
)
def test_a_rank_that_shards_is_named_without_replicas(
    world: int, parallel: dict[str, int], times: int, ranks: list[int], certain: bool,
    text: Path, tmp_path: Path,
) -> None:  # fmt: skip
    spec = exact_of(tmp_path, text, parallel)
    code, said = launch(spec, world, (1, break_gradients, 4, times))
    assert code == 1, said
    (found,) = events(tmp_path / "run", "corruption")
    assert (found["kind"], found["step"]) == ("gradients", 3)
    assert (found["ranks"], found["certain"]) == (ranks, certain)


@pytest.mark.slow
def test_replicas_are_compared_at_every_step(text: Path, tmp_path: Path) -> None:
    """Without a save, and without an interval."""
    spec = exact_of(tmp_path, text, {"dp_replicate": 2}, verify={},
                    checkpoint={"interval_steps": 4})  # fmt: skip
    code, said = launch(spec, 2, (1, break_parameter, 2))
    assert code == 1, said
    assert said.startswith("error: after step 2, ")
    (found,) = events(tmp_path / "run", "corruption")
    assert (found["kind"], found["step"], found["to_step"]) == ("parameters", 2, 0)
    off = ("verify.parameters_interval_steps=0", f"run_dir={tmp_path / 'off'}")
    assert launch(spec, 2, (1, break_parameter, 2), *off)[0] == 0


def test_only_exact_runs_that_shard_rotate() -> None:
    from parallel import Topology

    def rotation(exact: bool, **degrees: int) -> _Rotation | None:
        return _Rotation.of(Topology(**degrees), exact=exact)

    assert rotation(False, dp_shard=4) is None
    assert rotation(True, dp_replicate=4) is None
    assert rotation(True, dp_shard=4, pp=2) is None
    assert rotation(True, dp_shard=2, cp=2) is None
    assert rotation(True, dp_shard=2, tp=2) is None
    assert rotation(True, dp_shard=4) == _Rotation(1, Topology(dp_replicate=4), experts=True)
    assert rotation(True, dp_shard=4, ep=2) == _Rotation(
        2, Topology(dp_replicate=2, dp_shard=2), experts=True
    )
    assert rotation(True, dp_shard=4, ep=4) == _Rotation(1, Topology(dp_replicate=4), experts=False)
