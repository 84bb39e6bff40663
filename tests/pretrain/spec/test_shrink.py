"""Recipes of large models, shrunk by one flag to runs of a minute."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.spec import load_spec
from pretrain.spec.shrink import shrink
from pretrain.spec.table import read_table
from tests.support.jobs import events, write_corpus

RECIPES = Path(__file__).parents[3] / "tools" / "recipes"
LARGE = sorted(path.stem for path in RECIPES.glob("*.toml") if path.stem != "stdlib-tiny")


@pytest.mark.parametrize("name", LARGE)
def test_a_shrunk_recipe_is_small_and_of_its_kind(name):
    path = RECIPES / f"{name}.toml"
    whole, small = load_spec(path), load_spec(path, shrunk=True)
    assert small.name == f"{name}-shrunk"
    assert small.model.d_model == 64
    assert 1 < small.model.num_layers <= 3
    assert small.moe.num_experts <= 8
    for field in ("qk_norm", "rope_interleaved", "rope_theta", "norm_eps", "tie_embeddings"):
        assert getattr(small.model, field) == getattr(whole.model, field)
    for field in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "first_k_dense"):
        assert bool(getattr(small.model, field)) == bool(getattr(whole.model, field))
    grouped = [each.model.num_kv_heads < each.model.num_heads for each in (small, whole)]
    assert grouped[0] == grouped[1]
    for field in (
        "score_func", "route_scale", "expert_bias", "bias_update_rate", "aux_loss_coeff",
        "seq_aux_loss_coeff", "aux_loss_scope", "norm_topk_prob", "softmax_after_topk",
        "dispatcher",
    ):  # fmt: skip
        assert getattr(small.moe, field) == getattr(whole.moe, field)
    assert bool(small.moe.num_shared_experts) == bool(whole.moe.num_shared_experts)
    assert (small.moe.n_groups > 1) == (whole.moe.n_groups > 1)
    assert small.precision == whole.precision
    assert small.parallel.memory == whole.parallel.memory
    assert small.schedule.kind == whole.schedule.kind


def test_a_spec_that_is_small_already_keeps_its_sizes():
    path = RECIPES / "deepseek-v3.toml"
    table = read_table(path, "spec")
    table["moe"]["num_experts"], table["model"]["num_layers"] = 4, 2
    before = copy.deepcopy(table)
    found = shrink(table)
    assert (found["moe"]["num_experts"], found["model"]["num_layers"]) == (4, 2)
    assert table == before, "the table that was given stays as it was"
    assert load_spec(path, ["moe.num_experts=6"], shrunk=True).moe.num_experts == 6


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("text") / "text", files=80)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_shrunk_recipe_trains(name, text, tmp_path):
    settings = ("train.steps=8", f"data.source={text}", f"data.path={text.parent / 'corpus'}")
    command = [
        sys.executable, "-m", "convoy", "pretrain", str(RECIPES / f"{name}.toml"),
        "--shrink", *(word for each in settings for word in ("--set", each)),
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    losses = [one["loss"] for one in events(tmp_path / "runs" / f"{name}-shrunk", "step")]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
