"""What a run with ``elastic.recovery`` ``heal`` does where it cannot heal."""

import pytest

from pretrain.elastic import launched_layout, why_not_healed
from pretrain.elastic.layout import ChosenLayout
from tests.support.jobs import make_spec


def why(folder, spares=0, world=2, **sections) -> str:
    parallel = {"dp_replicate": 2, "dp_shard": 1} | sections.pop("parallel", {})
    spec = make_spec(folder, elastic={"recovery": "heal"}, parallel=parallel, **sections)
    return why_not_healed(spec, ChosenLayout(spec.topology(world), spares))


def test_two_replicas_heal(tmp_path):
    assert why(tmp_path) == ""


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"parallel": {"dp_replicate": 1, "dp_shard": 2}}, "dp_replicate (1)"),
        ({"spares": 1}, "1 of the ranks over"),
        ({"parallel": {"gradient_compression": "one_bit"}}, "gradient_compression (one_bit)"),
        ({"moe": {"num_experts": 4, "top_k": 2, "d_ff": 24, "aux_loss_scope": "global_batch"}},
         "aux_loss_scope (global_batch)"),
        ({"optimizer": {"kind": "muon", "lr": 0.003}}, "optimizer.kind (muon)"),
        ({"checkpoint": {"tiers": {"memory": True}}}, "checkpoint.tiers"),
    ],
)  # fmt: skip
def test_the_reason_is_named(tmp_path, sections, reason):
    assert reason in why(tmp_path, **sections)


def test_without_torchrun_the_run_is_one_process(tmp_path, monkeypatch):
    from pretrain.elastic import with_recovery

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    spec = make_spec(tmp_path, elastic={"recovery": "heal"})
    assert with_recovery(spec, launched_layout(spec), lambda seat: 7 if seat is None else 1) == 7
