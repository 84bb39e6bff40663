"""Checkpoints that torchtitan itself has written are taken over and trained on, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convoy.commands.command_line import main
from convoy.commands.pretrain import main as pretrain
from convoy.convert.formats import move
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec
from tests.support.peers import documented, run_script
from tests.support.peers.compare import assert_same_logits, assert_same_training, model_of
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.timeout(900)]
SECTIONS = {
    "deepseek_v3": {
        "model": {
            "vocab_size": 320, "d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4,
            "d_ff": 40, "first_k_dense": 1, "kv_lora_rank": 16, "q_lora_rank": 12,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "qk_norm": "none",
            "rope_theta": 10000.0, "rope_interleaved": True, "norm_eps": 1e-5,
            "yarn": {
                "factor": 4.0, "original_seq_len": 16, "mscale": 0.7, "mscale_all_dim": 0.7,
            },
        },
        "moe": {
            "num_experts": 8, "top_k": 3, "d_ff": 16, "num_shared_experts": 2,
            "score_func": "sigmoid", "n_groups": 4, "topk_groups": 2, "norm_topk_prob": True,
            "route_scale": 2.5, "expert_bias": True, "aux_loss_coeff": 0.0,
        },
    },
    "qwen3": {
        "model": {
            "vocab_size": 320, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "head_dim": 12, "qk_norm": "head", "rope_theta": 700.0, "norm_eps": 1e-6,
            "d_ff": 0, "first_k_dense": 0,
        },
        "moe": {
            "num_experts": 8, "top_k": 2, "d_ff": 16, "expert_bias": True, "aux_loss_coeff": 0.0,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=SECTIONS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def taken_over(kind, tmp_path_factory) -> Path:
    """A folder with torchtitan's checkpoint, and with ``weights``, what the command makes of it."""
    folder = tmp_path_factory.mktemp(kind)
    run_script("titan", "torchtitan", kind, folder)
    places = {
        "outputs/checkpoint/step-1000": folder / "checkpoint/step-3",
        "weights": folder / "weights",
    }
    assert main(arguments=documented("outputs/checkpoint/step-1000 weights", places)) == 0
    return folder


def test_logits_and_training_are_those_of_torchtitan(kind, taken_over, tmp_path):
    spec = make_spec(tmp_path, **SECTIONS[kind])
    model = model_of(spec, taken_over / "weights")
    assert_same_logits(model, taken_over / "expected.pt")
    assert_same_training(model, taken_over / "expected.pt")


@pytest.mark.parametrize("way", [["megatron", "deepspeed"], ["automodel", "convoy"]])
def test_torchtitan_goes_on_after_a_way_through_others(kind, way, taken_over, tmp_path):
    """With moments, experts' biases, counters and schedule: its next losses are the same."""
    if kind == "deepseek_v3" and "megatron" in way:
        way = way[1:]  # which has no latent attention
    last = taken_over / "checkpoint/step-3"
    for to in way:
        move(last, tmp_path / to, to, num_heads=4, samples=6 if to == "megatron" else None)
        last = tmp_path / to
    move(last, tmp_path / "checkpoint/step-3", "torchtitan", num_heads=4)
    run_script("titan", "torchtitan", kind, tmp_path, tmp_path)
    found = torch.load(tmp_path / "resumed.pt")["continued"]
    expected = torch.load(taken_over / "expected.pt")["continued"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def train(rank: int, spec: str) -> int:
    return pretrain([spec])


def test_a_run_begins_with_the_weights(kind, taken_over, tmp_path):
    """On two ranks with half of the experts each, with text of its own."""
    job = prepare_job(tmp_path / "job")
    weights = {"checkpoint": str(taken_over / "weights")}
    spec = write_spec(
        tmp_path, data=data_of(job), init=weights, parallel={"ep": 2}, train={"steps": 12},
        **SECTIONS[kind],
    )  # fmt: skip
    assert run_ranks(train, 2, str(spec), group=False) == [0, 0]
    losses = [event["loss"] for event in events(tmp_path / "run", "step")]
    assert losses[-1] < losses[0] - 0.3
