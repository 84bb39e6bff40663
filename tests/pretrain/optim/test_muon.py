"""Muon in one process: against torch.optim.Muon, its parts, its fields, and its checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from convoy.plan.hardware import load_cluster
from convoy.plan.memory import memory
from convoy.plan.search import program_of
from convoy.plan.shape import ModelShape
from convoy.plan.step_time import step_time
from convoy.plan.work import Program, Work
from moe import MoEConfig
from parallel import Topology
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder, meta_decoder
from pretrain.model.init import is_hidden_matrix
from pretrain.optim import (
    AdamWConfig,
    MuonConfig,
    OptimizerFields,
    Surroundings,
    build_optimizer,
    orthogonalized,
)
from pretrain.optim.muon import _one_by_one
from pretrain.parallelize.layouts import parameter_layouts
from pretrain.spec.job import JobSpec
from pretrain.state.arrays import training_arrays
from tests.support.jobs import make_spec, tiny

MODEL = ModelConfig(
    vocab_size=300, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=40, first_k_dense=1
)
MOE = MoEConfig(
    d_model=16, d_ff=24, num_experts=4, top_k=2, num_shared_experts=1, shared_expert_gate=True,
    ffn_bias=True,
)  # fmt: skip
CONFIG = MuonConfig(lr=0.01, weight_decay=0.2, momentum=0.9)


def decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(MODEL, MOE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("size", [7, 33, 100, 4099])
def test_a_slices_numbers_have_the_bits_of_the_whole(size: int) -> None:
    """Exact runs rely on that: FSDP cuts a tensor where the layout says."""
    torch.manual_seed(0)
    x, y = torch.randn(2, size)
    for start in range(0, size, max(size // 9, 1)):
        for stop in (start + 1, start + 5, start + 13, size):
            a, b = x[start:stop].clone(), y[start:stop].clone()
            for share in (0.05, 0.95):
                assert torch.equal(a.lerp(b, share), x.lerp(y, share)[start:stop])
            assert torch.equal(a.add(b, alpha=-0.0123), x.add(y, alpha=-0.0123)[start:stop])


@pytest.mark.parametrize("shape", [(7, 9), (16, 32), (33, 21)])
def test_a_matrix_of_an_exact_run_has_its_bits_beside_others(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x_BMN = torch.randn(8, *shape)
    updates_BMN = _one_by_one(x_BMN)
    for matrix, update in zip(x_BMN.split(1), updates_BMN.split(1), strict=True):
        assert torch.equal(update, orthogonalized(matrix.clone(), 5))


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def reference(steps: int) -> dict[str, Tensor]:
    """torch.optim.Muon on each matrix alone, and torch.optim.AdamW on everything else."""
    model = decoder()
    matrices: dict[str, list[nn.Parameter]] = {}
    rest: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name in MATRICES:
            matrices[name] = [parameter]
        elif name in MATRICES:
            matrices[name] = [nn.Parameter(each.clone()) for each in parameter.detach()]
        else:
            rest[name] = parameter
    decayed = [p for name, p in rest.items() if name in ("embed.weight", "head.weight",
               "layers.1.moe.shared_gate.weight")]  # fmt: skip
    others = [p for p in rest.values() if not any(p is d for d in decayed)]
    muon = torch.optim.Muon(
        [p for each in matrices.values() for p in each],
        lr=0.01, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95),
    )  # fmt: skip
    for step in range(steps):
        for name, gradient in gradients(model, step).items():
            if name in rest:
                rest[name].grad = gradient
            else:
                for i, each in enumerate(matrices[name]):
                    each.grad = gradient if gradient.ndim == 2 else gradient[i]
        muon.step()
        adamw.step()
    found = {name: p.detach() for name, p in rest.items()}
    for name, each in matrices.items():
        stacked = torch.stack([p.detach() for p in each])
        found[name] = stacked if stacked.shape[0] > 1 else stacked[0]
    return found


MATRICES = {
    *(f"layers.{i}.attention.{w}.weight" for i in (0, 1) for w in ("wq", "wk", "wv", "wo")),
    *(f"layers.0.ffn.{w}.weight" for w in ("w_gate", "w_up", "w_down")),
    *(f"layers.1.moe.shared_experts.{w}.weight" for w in ("w_gate", "w_up", "w_down")),
    *(f"layers.1.moe.experts.{w}" for w in ("w_gate", "w_up", "w_down")),
    "layers.1.moe.router.weight",
}


def test_matrices_are_hidden_ones_and_routers():
    hidden = {n for n, p in decoder().named_parameters() if is_hidden_matrix(n, p.shape)}
    assert hidden == MATRICES


def test_the_update_is_that_of_torch(monkeypatch):
    # torch's Muon computes in bfloat16; its own code in float32 is the reference.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    expected = reference(3)
    monkeypatch.undo()
    model = decoder()
    optimizer = build_optimizer(model, CONFIG)
    for step in range(3):
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    start = {name: p.detach() for name, p in decoder().named_parameters()}
    for name, p in model.named_parameters():
        parameter = p.detach()
        moved = float((parameter - start[name]).abs().max())
        assert moved > 1e-3, f"{name} has not moved"
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-5 * moved)


@pytest.mark.parametrize("shape", [(3, 12, 12), (3, 12, 40), (3, 40, 12), (1, 1, 5)])
def test_singular_values_come_near_to_one(shape: tuple[int, int, int]):
    x = torch.randn(shape)
    y = orthogonalized(x, 5)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    found = torch.linalg.svdvals(y)
    shares = s / s.square().sum(-1, keepdim=True).sqrt()
    assert bool((found[shares > 0.02] > 0.6).all())
    assert float(found.max()) < 1.3
    # The singular vectors stay: U^T Y V is diagonal.
    inner = u.mT @ y @ vt.mT
    assert float((inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max()) < 1e-5


def test_a_matrix_is_orthogonalized_by_itself():
    x = torch.randn(4, 10, 7)
    x[2] = 0
    together = orthogonalized(x, 5)
    for i in range(4):
        torch.testing.assert_close(together[i], orthogonalized(x[i : i + 1], 5)[0])
    assert bool((together[2] == 0).all())
    torch.testing.assert_close(orthogonalized(x * 1e4, 5), together, rtol=1e-4, atol=1e-5)


def test_the_root_mean_square_of_an_update_is_that_of_moonlight():
    for shape in ((64, 64), (32, 128), (128, 32)):
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(shape))
        optimizer = build_optimizer(model, MuonConfig(lr=1.0))
        model.w.grad = torch.randn(shape)
        optimizer.step()
        rms = float(model.w.detach().square().mean().sqrt())
        assert rms == pytest.approx(0.2, rel=0.25), shape


def test_bfloat16_is_near_to_float32():
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = decoder()
        optimizer = build_optimizer(model, CONFIG, Surroundings(compute=dtype))
        for name, gradient in gradients(model, 0).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
        found[dtype] = model.layers["0"].attention.wq.weight.detach()
    start = decoder().layers["0"].attention.wq.weight.detach()
    near, exact = found["bfloat16"] - start, found["float32"] - start
    difference = float((near - exact).norm() / exact.norm())
    assert 1e-6 < difference < 0.05
    assert found["bfloat16"].dtype == torch.float32


def test_the_dtype_follows_that_of_compute():
    assert MuonConfig(lr=1.0).products_dtype("float32") == "float32"
    assert MuonConfig(lr=1.0).products_dtype("bfloat16") == "bfloat16"
    assert MuonConfig(lr=1.0).products_dtype("float16") == "bfloat16"


def test_a_matrix_without_a_gradient_counts_as_one_of_zeros():
    model = decoder()
    optimizer = build_optimizer(model, CONFIG)
    wq = model.layers["0"].attention.wq.weight
    before = wq.detach().clone()
    for name, gradient in gradients(model, 0).items():
        parameter = model.get_parameter(name)
        parameter.grad = None if parameter is wq else gradient
    optimizer.step()
    torch.testing.assert_close(wq.detach(), before * (1 - 0.01 * 0.2))


def test_a_model_without_matrices_has_adamw_alone():
    model = nn.RMSNorm(8)
    optimizer = build_optimizer(model, CONFIG)
    model.weight.grad = torch.ones(8)
    optimizer.step()
    assert float(model.weight.detach().max()) == pytest.approx(0.99)


# Checkpoints and the planner.


def test_a_checkpoint_has_one_moment_of_matrices_and_two_of_the_rest():
    model = decoder()
    optimizer = build_optimizer(model, CONFIG)
    arrays = training_arrays(meta_decoder(MODEL, MOE), model, optimizer,
                             parameter_layouts(model, Topology()), 0)  # fmt: skip
    kept: dict[str, set[str]] = {}
    for array in arrays:
        prefix, _, rest = array.spec.name.partition("/")
        if prefix == "optimizer":
            key, _, path = rest.partition("/")
            kept.setdefault(key, set()).add(path)
    matrices = {name.replace(".0.", ".").replace(".1.", ".").replace(".", "/") for name in MATRICES}
    every = {
        array.spec.name.removeprefix("model/")
        for array in arrays
        if array.spec.name.startswith("model/")
    } - {name.replace(".1.", ".").replace(".", "/") for name, _ in model.named_buffers()}
    assert kept == {
        "momentum_buffer": matrices, "exp_avg": every - matrices, "exp_avg_sq": every - matrices,
    }  # fmt: skip


def test_a_stage_without_a_moment_has_its_arrays_too():
    """Every rank lists the same arrays: here each of the two places along pp has one layer."""
    whole = meta_decoder(MODEL, MOE)
    first = ("embed", "layers.0")
    layouts = parameter_layouts(
        whole, Topology(pp=2), stage=lambda name: 0 if name.startswith(first) else 1
    )
    stages = (Decoder(MODEL, MOE, [place]) for place in range(2))
    names = [
        [
            array.spec.name
            for array in training_arrays(
                whole, stage, build_optimizer(stage, CONFIG), layouts, rank
            )
        ]
        for rank, stage in enumerate(stages)
    ]
    assert names[0] == names[1]
    assert "optimizer/exp_avg/embed/weight" in names[1]
    assert "optimizer/momentum_buffer/embed/weight" not in names[0]


def test_a_plan_has_the_optimizer_of_the_spec(tmp_path: Path):
    spec = make_spec(tmp_path, optimizer={"kind": "muon"})
    assert program_of(spec).optimizer == spec.optimizer


def test_a_plan_counts_products_that_ranks_share_and_one_moment():
    moe = MoEConfig(d_model=2048, d_ff=1024, num_experts=64, top_k=8)
    model = ModelConfig(
        vocab_size=32000, d_model=2048, num_layers=8, num_heads=16, num_kv_heads=4, d_ff=0
    )
    cluster = load_cluster("h100")

    def work(config: OptimizerFields, topology: Topology) -> Work:
        program = Program(optimizer=config)
        return Work(ModelShape.of(model, moe), topology, 4096, 256, 1, program=program)

    adamw, muon = AdamWConfig(lr=1.0), MuonConfig(lr=1.0)
    seconds = {
        (config.kind, ranks): step_time(work(config, Topology(dp_shard=ranks)), cluster).optimizer
        for config in (adamw, muon)
        for ranks in (1, 8)
    }
    flops = 2 * 8 * sum(
        matrix.copies * sum(math.prod(each) for each in muon.matrix_products(matrix.n, matrix.k))
        for matrix in ModelShape.of(model, moe).hidden_matrices(0)
    )  # fmt: skip
    peak = cluster.chip.peak("bfloat16")
    assert flops / peak < seconds["muon", 1] - seconds["adamw", 1] < 3 * flops / peak
    assert seconds["muon", 8] < seconds["muon", 1] / 2
    kept = [memory(work(each, Topology()), cluster.chip).optimizer for each in (adamw, muon)]
    assert kept[0] / 2 < kept[1] < 0.55 * kept[0]


# The section of the spec.


def refused(tmp_path: Path, **sections: Any) -> str:
    with pytest.raises(ValidationError) as error:
        JobSpec.model_validate(tiny(tmp_path, **sections))
    return str(error.value)


def test_a_spec_without_a_kind_is_one_of_adamw(tmp_path: Path):
    spec = make_spec(tmp_path)
    assert isinstance(spec.optimizer, AdamWConfig)
    assert spec.hash == make_spec(tmp_path, optimizer={"kind": "adamw"}).hash
    assert spec.hash != make_spec(tmp_path, optimizer={"kind": "muon"}).hash
    assert JobSpec.model_validate(spec.as_dict()) == spec


def test_wrong_fields_are_refused_in_a_line(tmp_path: Path):
    text = refused(tmp_path, optimizer={"momentum": 0.9})
    assert (
        "optimizer.momentum (0.9) must be left out with optimizer.kind (adamw); kind muon" in text
    )


def test_products_of_an_update():
    products = MuonConfig(lr=1.0).matrix_products(8, 20)
    assert len(products) == 15
    # X X^T, its square, and its product with X.
    assert math.prod(products[0]) + math.prod(products[2]) == 2 * 8 * 8 * 20
    assert math.prod(products[1]) == 8**3
    assert products == MuonConfig(lr=1.0).matrix_products(20, 8)
    assert AdamWConfig(lr=1.0).matrix_products(8, 20) == []
    assert Surroundings().compute == "float32"
