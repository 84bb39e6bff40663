"""The layers of each pipeline stage."""

from __future__ import annotations

from functools import lru_cache

from moe import MoEConfig
from pretrain.model import ModelConfig, forward_flops


def stage_layers(
    model: ModelConfig, moe: MoEConfig | None, *, seq_len: int, num_stages: int
) -> list[range]:
    """The layers of every stage: consecutive, with the smallest cost of the costliest stage.

    The cost of a layer is its model FLOPs, see :func:`pretrain.model.forward_flops`; the last stage
    has the FLOPs of the head and of multi-token prediction too. Of several such splits, the one
    with the shortest first stages.

    Raises ValueError where the model has fewer layers than stages.
    """
    L = model.num_layers
    if num_stages > L:
        raise ValueError(
            f"model.num_layers ({L}) must be at least parallel.pp x "
            f"parallel.pipeline.stages_per_rank ({num_stages} stages)"
        )
    flops = forward_flops(model.model_copy(update={"num_mtp_layers": 0}), moe, seq_len)
    num_dense = L if moe is None else model.first_k_dense
    attention = (flops.attention_projections + flops.attention_scores) / L
    dense = flops.dense_layers / max(num_dense, 1)
    sparse = (flops.routers + flops.experts) / max(L - num_dense, 1)
    costs = [attention + (dense if i < num_dense else sparse) for i in range(L)]
    costs[-1] += forward_flops(model, moe, seq_len).total - flops.total + flops.head

    @lru_cache(None)
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The cost of the costliest of ``stages`` stages from layer ``start`` on, and each end."""
        if stages == 1:
            return sum(costs[start:]), (L,)
        ways = []
        for stop in range(start + 1, L - stages + 2):
            rest, ends = best(stop, stages - 1)
            ways.append((max(sum(costs[start:stop]), rest), (stop, *ends)))
        return min(ways)

    ends = best(0, num_stages)[1]
    return [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]
