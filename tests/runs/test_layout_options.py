"""Options whose losses depend on the layout: where, and where not, as docs/parallelism.md says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import spec_for, train

SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 2},
    "train": {"steps": 20}, "batch": {"global_batch_size": 5}, "optimizer": {"eps": 1e-4},
}  # fmt: skip
TIGHT = {"capacity": {"policy": "fixed", "capacity_factor": 1.0}}
BOUND = {"capacity": {"policy": "dropless", "max_tokens_per_rank": 40}}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("options")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "equal", "different"),
    [
        pytest.param({}, ["dp_shard=2,ep=2", "cp=2"], [], id="defaults"),
        pytest.param(
            {"aux_loss_scope": "global_batch"}, ["cp=2", "tp=2,ep=2"], ["dp_shard=2"], id="scope"
        ),
        pytest.param(TIGHT, ["dp_shard=2", "pp=2"], ["cp=2", "tp=2"], id="fixed"),
        pytest.param(
            BOUND, ["dp_shard=2", "pp=2"], ["dp_shard=2,ep=2", "cp=2", "tp=2"], id="bound"
        ),
        pytest.param(
            {"routing": "expert_choice"}, ["dp_shard=2,ep=2"], ["cp=2", "tp=2"], id="experts choose"
        ),
        pytest.param({"routing": "sinkhorn"}, ["dp_shard=2,ep=2"], ["cp=2", "tp=2"], id="sinkhorn"),
        pytest.param({"input_jitter": 0.05}, [], ["dp_shard=2", "pp=2"], id="jitter"),
    ],
)
def test_losses_of_an_option_agree_where_the_page_says(moe, equal, different, data, tmp_path):
    def losses(layout: str) -> list[float]:
        (tmp_path / layout).mkdir()
        sections = {**SECTIONS, "moe": {"num_experts": 8, **moe}}
        return train(spec_for(tmp_path / layout, data, layout, **sections), 3).losses

    alone = losses("dp_shard=1")
    for layout in equal:
        assert losses(layout) == pytest.approx(alone, rel=1e-5), layout
    for layout in different:
        assert losses(layout) != pytest.approx(alone, rel=1e-4), layout
