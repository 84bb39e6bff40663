"""What every kind of optimizer must do, whichever it is: the contract of ``pretrain.optim``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from convoy.plan.memory import moments_kept, rank_parameters
from convoy.plan.shape import ModelShape
from convoy.plan.work import Program, Work
from moe import MoEConfig
from parallel import Topology
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder
from pretrain.model.init import is_hidden_matrix
from pretrain.optim import (
    KINDS,
    OptimizerFields,
    build_optimizer,
    moment_names,
    moments,
    set_lr,
    set_update_count,
)

MODEL = ModelConfig(
    vocab_size=300, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=40, first_k_dense=1
)
LATENT = ModelConfig(
    vocab_size=300, d_model=16, num_layers=2, num_heads=4, num_kv_heads=4, d_ff=40,
    first_k_dense=1, qk_norm="none", kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=8,
)  # fmt: skip
MODELS = [MODEL, MODEL.model_copy(update={"qk_norm": "all_heads"}), LATENT]
MOE = MoEConfig(
    d_model=16, d_ff=24, num_experts=4, top_k=2, num_shared_experts=1, shared_expert_gate=True
)


@pytest.fixture(params=sorted(KINDS))
def config(request: pytest.FixtureRequest) -> OptimizerFields:
    return KINDS[request.param](lr=0.01)


def decoder(config: ModelConfig = MODEL) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config, MOE)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_moments_are_there_at_once_and_are_those_that_the_config_names(config):
    model = decoder()
    optimizer = build_optimizer(model, config)
    named = moment_names(optimizer, model, model)
    for turn in range(2):
        kept = moments(optimizer, model)
        assert {key: set(of) for key, of in kept.items()} == {k: set(n) for k, n in named.items()}
        for name, parameter in model.named_parameters():
            hidden = is_hidden_matrix(name, parameter.shape)
            expected = config.matrix_moments if hidden else config.other_moments
            assert {key for key, of in kept.items() if name in of} == set(expected), name
            assert all(bool(kept[key][name].any()) == bool(turn) for key in expected), name
        step(model, optimizer, turn)


def test_moments_and_the_count_are_all_that_a_resume_needs(config):
    straight = decoder()
    optimizer = build_optimizer(straight, config)
    for number in range(2):
        step(straight, optimizer, number)
    resumed = decoder()
    resumed.load_state_dict(straight.state_dict())
    other = build_optimizer(resumed, config)
    for key, of in moments(optimizer, straight).items():
        for name, value in of.items():
            moments(other, resumed)[key][name].copy_(value)
    set_update_count(other, 2)
    step(straight, optimizer, 2)
    step(resumed, other, 2)
    for name, value in values(straight).items():
        assert torch.equal(value, resumed.get_parameter(name)), name


def test_each_parameter_is_updated_at_the_rate_that_is_set(config):
    model = decoder()
    optimizer = build_optimizer(model, config)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    before = values(model)
    set_lr(optimizer, 0.0)
    step(model, optimizer, 0)
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())
    set_lr(optimizer, 0.01)
    step(model, optimizer, 1)
    assert not any(torch.equal(p, before[name]) for name, p in values(model).items())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("model_config", MODELS)
def test_the_planner_counts_the_moments_that_there_are(config, model_config):
    model = decoder(model_config)
    kept = moments(build_optimizer(model, config), model)
    numbers = sum(value.numel() for of in kept.values() for value in of.values())
    shape = ModelShape.of(model_config, MOE)
    work = Work(shape, Topology(), 32, 8, 2, program=Program(optimizer=config))
    assert moments_kept(work, rank_parameters(work, 0)) == numbers
