"""Whole steps of the reference model on one of up to 1,024 fake GPUs, with each layout and option.

A step is two micro-batches forward and backward, the gradient norm, and the update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from moe import MoEConfig
from parallel import CompressedSum, ParallelConfig, ParallelDims, grad_square_sum
from pretrain.model import ModelConfig
from pretrain.optim import AdamWConfig, MuonConfig, Surroundings, build_optimizer
from pretrain.parallelize import LocalBatch, MTPLoss, ParallelModel, forward_backward, parallelize
from tests.support.fake_gpu import shapes

MODEL = {
    "vocab_size": 32000, "d_model": 1024, "num_layers": 4, "num_heads": 16, "num_kv_heads": 4,
    "first_k_dense": 1, "d_ff": 2048,
}  # fmt: skip
MOE = {"d_model": 1024, "d_ff": 512, "num_experts": 64, "top_k": 4, "num_shared_experts": 1}
MLA = {
    "num_kv_heads": 16, "qk_norm": "none", "kv_lora_rank": 256, "q_lora_rank": 384,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
BATCH, SEQ_LEN, MICRO_BATCHES = 2, 2048, 2


@dataclass(frozen=True)
class Case:
    """A layout, and what else differs from the plain run in bfloat16."""

    parallel: dict[str, Any]
    world: int = 8
    model: dict[str, Any] = field(default_factory=dict)
    moe: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    muon: bool = False
    exact: bool = False
    compiled: bool = False
    float8: bool = False
    end_token: int | None = None
    rank: int = 0


EP = {"dp_shard": 8, "ep": 8}
PP = {"pp": 2, "dp_shard": 4, "ep": 4}


def _memory(**options: Any) -> dict[str, Any]:
    return EP | {"memory": options}


def _pipeline(**options: Any) -> dict[str, Any]:
    return PP | {"pipeline": options}


CASES: dict[str, Case] = {
    "one rank": Case({"dp_shard": 1}, world=1),
    "fsdp 8": Case({"dp_shard": 8}),
    "replicas 8": Case({"dp_replicate": 8}),
    "fsdp 8, ep 8": Case(EP),
    "replicas 2, fsdp 4, ep 4": Case({"dp_replicate": 2, "dp_shard": 4, "ep": 4}),
    "tp 4, fsdp 2": Case({"tp": 4, "dp_shard": 2}),
    "tp 2, fsdp 4, ep 8": Case({"tp": 2, "dp_shard": 4, "ep": 8}),
    "cp 2, fsdp 4, ep 8": Case({"cp": 2, "dp_shard": 4, "ep": 8}),
    "pp 2, 1f1b": Case(PP),
    "pp 2, 1f1b, last stage": Case(PP, rank=4),
    "pp 2, interleaved": Case(_pipeline(stages_per_rank=2)),
    "pp 2, zbv": Case(_pipeline(schedule="zbv", stages_per_rank=2)),
    "pp 2, dualpipev": Case(_pipeline(schedule="dualpipev", stages_per_rank=2)),
    "pp 2, gpipe": Case(_pipeline(schedule="gpipe")),
    "64 ranks: tp 2, cp 2, pp 2, fsdp 8, ep 32": Case(
        {"tp": 2, "cp": 2, "pp": 2, "dp_shard": 8, "ep": 32}, world=64
    ),
    "1024 ranks: pp 2, replicas 4, fsdp 128, ep 64": Case(
        {"pp": 2, "dp_replicate": 4, "dp_shard": 128, "ep": 64}, world=1024
    ),
    "zero 2": Case(_memory(zero_stage=2)),
    "zero 1": Case(_memory(zero_stage=1)),
    "float32": Case(EP, dtype="float32"),
    "float16": Case(EP, dtype="float16"),
    "recompute full": Case(_memory(recompute="full")),
    "recompute full, ep 1": Case({"dp_shard": 8, "memory": {"recompute": "full"}}),
    "recompute selective": Case(_memory(recompute="selective")),
    "recompute selective, ep 1": Case({"dp_shard": 8, "memory": {"recompute": "selective"}}),
    "recompute selective, float32": Case(_memory(recompute="selective"), dtype="float32"),
    "offload activations": Case(_memory(offload_activations=True)),
    "offload optimizer": Case(_memory(offload_optimizer=True)),
    "float8": Case(EP, float8=True),
    "mtp": Case(EP, model={"num_mtp_layers": 1}),
    "mla": Case(EP, model=MLA),
    "mla, cp 2": Case({"cp": 2, "dp_shard": 4, "ep": 8}, model=MLA),
    "documents": Case(EP, end_token=0),
    "documents, cp 2": Case({"cp": 2, "dp_shard": 4, "ep": 8}, end_token=0),
    "muon": Case(EP, muon=True),
    "muon, replicas 2": Case({"dp_replicate": 2, "dp_shard": 4, "ep": 4}, muon=True),
    "exact": Case(EP, exact=True),
    "padded": Case(
        EP, moe={"dispatcher": "padded_all_to_all", "max_tokens_per_call": BATCH * SEQ_LEN}
    ),
    "compiled": Case(EP, compiled=True),
    "one_bit": Case({"dp_replicate": 8, "gradient_compression": "one_bit"}),
}


def measure(name: str) -> dict[str, Any]:
    """The counts of a case's forwards and backwards, and of the rest of the step."""
    case = CASES[name]
    shapes.start(case.world, case.rank)
    parallel = ParallelConfig.model_validate(case.parallel)
    dims = ParallelDims.build(parallel.topology(case.world), "cuda", shapes.DEVICES)
    with shapes.machine() as tally:
        model, optimizer = _model(case, parallel, dims)
        tally.take()
        _forward_backward(case, model, dims)
        counts = {"forward and backward": tally.take()}
        if parallel.gradient_compression != "none":
            group = dims.replicate_mesh.get_group()
            sums = CompressedSum(model.local_model, group, parallel.gradient_compression)
            sums.reduce(1.0)
        if model.exact is not None:
            model.exact.finish()
            model.exact.square_sum(model.local_model, dims)
        else:
            float(grad_square_sum(model.local_model, dims))
        optimizer.step()
        optimizer.zero_grad()
        return counts | {"update": tally.take()}


def _model(
    case: Case, parallel: ParallelConfig, dims: ParallelDims
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    moe = MOE | case.moe
    moe |= {"gemm": "float8"} if case.float8 else {}
    moe |= {"aux_loss_scope": "previous_step"} if case.exact else {}
    model = parallelize(
        ModelConfig(**(MODEL | case.model)),
        MoEConfig(**moe),
        parallel=parallel,
        dims=dims,
        seq_len=SEQ_LEN,
        dtype=getattr(torch, case.dtype),
        compiled=case.compiled,
        dense_float8=case.float8,
        exact_units=64 if case.exact else None,
    )
    for stage in model.stages.values():
        stage.to_empty(device="cpu" if parallel.memory.offload_optimizer else "cuda")
    around = Surroundings(
        device=torch.device("cuda"),
        compute=case.dtype,
        layouts=model.layouts,
        dims=dims,
        exact=case.exact,
    )
    config = MuonConfig(lr=1e-3) if case.muon else AdamWConfig(lr=1e-3)
    return model, build_optimizer(model.local_model, config, around)


def _forward_backward(case: Case, model: ParallelModel, dims: ParallelDims) -> None:
    layers = case.model.get("num_mtp_layers", 0)
    batches = [
        torch.empty(BATCH, SEQ_LEN + 1, dtype=torch.int64, device="cpu")
        for _ in range(MICRO_BATCHES)
    ]
    options: dict[str, Any] = {
        "device": torch.device("cuda", 0),
        "local_batch": LocalBatch(dims, end_token=case.end_token, num_mtp_layers=layers),
        "reduce_once": case.parallel.get("memory", {}).get("zero_stage") == 1,
    }
    if layers:
        options["mtp"] = MTPLoss((0.1,) * layers, (1,) * layers)
    if model.exact is not None:
        model.exact.begin()
    if model.pipeline is None:
        forward_backward(model.local_model, batches, 1000.0, **options)
    else:
        model.pipeline.forward_backward(batches, 1000.0, **options)
