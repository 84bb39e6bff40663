"""One step of a tiny decoder under any layout, against a plain loop over its sequences.

Legend: B batch, W tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe import MoEConfig
from parallel import (
    ParallelConfig,
    ParallelDims,
    ShardLayout,
    Topology,
    clip_grad_norm,
    parse_topology,
)
from pretrain.model import Decoder, ModelConfig, init_parameters
from pretrain.optim import OptimizerFields, Surroundings, build_optimizer
from pretrain.parallelize import LocalBatch, MTPLoss, forward_backward, parallelize
from tests.support.ranks import run_ranks

W, VOCAB, LAYERS, SEED = 16, 260, 2, 3
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 16, "num_layers": LAYERS, "num_heads": 2, "num_kv_heads": 2,
    "d_ff": 24, "first_k_dense": 1,
}  # fmt: skip
MOE: dict[str, Any] = {
    "d_model": 16, "d_ff": 24, "num_experts": 4, "top_k": 2, "aux_loss_coeff": 0.0,
}  # fmt: skip
EXPERTS = "layers.1.moe.experts.w_up"
ROUTER = "layers.1.moe.router.weight"


def batch_of(targets: Iterable[int], seed: int = 0) -> Tensor:
    """[B, W + 1] tokens: of each sequence only the last ``targets`` tokens are targets."""
    counts = list(targets)
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(1, VOCAB, (len(counts), W + 1), generator=generator)
    for row, count in zip(batch, counts, strict=True):
        row[: W + 1 - count] = ~row[: W + 1 - count]  # inputs and no targets
    return batch


@dataclass(frozen=True)
class Step:
    """A step: a layout, and the micro-batches of each data-parallel rank."""

    layout: str
    batches: tuple[tuple[Tensor, ...], ...]
    moe: dict[str, Any] = field(default_factory=dict)
    mtp_weight: float = 0.0
    """Of one layer of multi-token prediction; 0 for no such layer."""
    max_norm: float = 1e9
    """Gradients are clipped to it."""
    optimizer: OptimizerFields | None = None
    """What makes an update from the gradients."""
    dtype: torch.dtype = torch.float32
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def topology(self) -> Topology:
        """The degrees."""
        return parse_topology(self.layout or "dp_shard=1")

    @property
    def configs(self) -> tuple[ModelConfig, MoEConfig]:
        """Of the decoder and its MoE layer."""
        model = ModelConfig(**MODEL, num_mtp_layers=int(self.mtp_weight > 0))
        return model, MoEConfig(**MOE | self.moe)

    @property
    def targets(self) -> int:
        """Over all ranks."""
        return sum(int((b[:, 1:] >= 0).sum()) for rank in self.batches for b in rank)


@dataclass(frozen=True)
class Outcome:
    """What a rank, or a plain loop, has after a step."""

    loss: float
    """The summed loss of this rank."""
    targets: int
    norm: float
    gradients: dict[str, Tensor]
    """With all shards put together."""
    updated: dict[str, Tensor] = field(default_factory=dict)
    """The parameters after the update."""


def on_ranks(step: Step) -> list[Outcome]:
    """The step on as many gloo ranks as its layout has."""
    return run_ranks(partial(_on_rank, step), step.topology.world)


def _on_rank(step: Step, rank: int) -> Outcome:
    topology, (config, moe) = step.topology, step.configs
    dims = ParallelDims.build(topology, "cpu")
    parallel = ParallelConfig(**topology.as_dict(), memory=step.memory)
    made = parallelize(config, moe, parallel=parallel, dims=dims, seq_len=W, dtype=step.dtype)
    for stage in made.stages.values():
        stage.to_empty(device="cpu")
    model = made.local_model
    init_parameters(model, made.layouts, rank, SEED, LAYERS)
    through: Callable[..., Any] = partial(forward_backward, model)
    result = (through if made.pipeline is None else made.pipeline.forward_backward)(
        list(step.batches[dims.dp_rank]), step.targets, device=torch.device("cpu"),
        local_batch=LocalBatch(dims, masked_targets=True, num_mtp_layers=config.num_mtp_layers),
        reduce_once=parallel.memory.zero_stage == 1,
        mtp=MTPLoss((step.mtp_weight,), (1,)) if step.mtp_weight else MTPLoss(),
    )  # fmt: skip
    norm = clip_grad_norm(model, dims, step.max_norm)
    gradients = {name: full(p.grad) for name, p in model.named_parameters()}
    updated = {}
    if step.optimizer is not None:
        around = Surroundings(made.layouts, dims)
        build_optimizer(model, step.optimizer, around).step()  # type: ignore[arg-type]
        updated = {name: full(p.detach()) for name, p in model.named_parameters()}
    return Outcome(float(result.loss_sum), result.target_tokens, norm, gradients, updated)


def router_on_rank(step: Step, rank: int) -> Tensor:
    """The initial weight of the MoE layer's router; each rank's generator is another one."""
    torch.manual_seed(rank)
    dims, (config, moe) = ParallelDims.build(step.topology, "cpu"), step.configs
    parallel = ParallelConfig(**step.topology.as_dict())
    made = parallelize(config, moe, parallel=parallel, dims=dims, seq_len=W)
    made.local_model.to_empty(device="cpu")
    init_parameters(made.local_model, made.layouts, rank, SEED, LAYERS)
    return full(made.local_model.get_parameter(ROUTER).detach())


def full(tensor: Tensor) -> Tensor:
    """All shards of a tensor; every rank that has a shard must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_decoder(step: Step) -> Decoder:
    """The decoder of the step in this process."""
    model = Decoder(*step.configs)
    layouts = {
        name: ShardLayout(tuple(p.shape), ((),) * p.ndim, Topology())
        for name, p in model.named_parameters()
    }
    init_parameters(model, layouts, 0, SEED, LAYERS)
    return model


def alone(step: Step) -> Outcome:
    """The step in one process: one sequence after another, by torch's cross-entropy."""
    model = plain_decoder(step)
    total = 0.0
    for batch in (b for rank in step.batches for b in rank):
        for row in batch:
            tokens = torch.where(row < 0, ~row, row)
            logits = model(tokens[:-1].unsqueeze(0)).logits[0]
            loss = F.cross_entropy(logits, row[1:].clamp_min(-1), ignore_index=-1, reduction="sum")
            total += float(loss.detach())
            (loss / step.targets).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(model.parameters(), step.max_norm)
    return Outcome(total, step.targets, float(norm), gradients)


def error(actual: Tensor, expected: Tensor) -> float:
    """The relative error in norm."""
    return float((actual - expected).norm() / expected.norm())


def errors(outcome: Outcome, expected: Outcome) -> dict[str, float]:
    """The gradients of an outcome that are not those expected."""
    wrong = {n: error(g, expected.gradients[n]) for n, g in outcome.gradients.items()}
    return {name: value for name, value in wrong.items() if not value < 1e-4}


def errors_of_ranks(step: Step) -> list[dict[str, float]]:
    """Of each rank, the gradients that are not those of one process."""
    expected = alone(step)
    return [errors(outcome, expected) for outcome in on_ranks(step)]
