"""Initial weights, which do not depend on the number of ranks.

Every matrix of the model, and every matrix of each expert, has its own random generator, seeded by
the job's seed and the parameter's name. A rank generates the matrices of which it has a shard, one
at a time, and keeps its shard. No rank ever has the whole model in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from parallel import ShardLayout, expert_parameter_names, local_shard


def init_parameters(
    model: nn.Module, layouts: Mapping[str, ShardLayout], rank: int, seed: int, num_layers: int
) -> None:
    """Fill every parameter of a parallelized, materialized model in place.

    Norm weights are ones; biases, buffers and the second matrices of adapters are zeros. The
    elements of a matrix are normal with standard deviation fan_in ** -0.5. For matrices whose
    output is added to the residual stream the deviation is divided by sqrt(2 · num_layers), as in
    GPT-2. The embedding and the routers have the standard deviation 0.02.

    Args:
        model: on its device; parameters may be DTensors.
        layouts: of every parameter, by name.
        rank: this rank.
        seed: the job's.
        num_layers: of the whole decoder.
    """
    experts = expert_parameter_names(model)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for name, parameter in model.named_parameters():
            box = layouts[name].box(rank)
            local = local_shard(parameter)
            shape = tuple(parameter.shape)
            if is_bias(name) or is_second_of_adapter(name):
                local.zero_()
            elif name in experts:
                rest = tuple(slice(*extent) for extent in box[1:])
                for expert in range(*box[0]):
                    whole = first_matrix(name, shape[1:], shape[1], num_layers, seed, expert)
                    local[expert - box[0][0]].copy_(whole[rest])
            elif parameter.ndim == 1:
                local.fill_(1.0)
            else:
                whole = first_matrix(name, shape, shape[-1], num_layers, seed)
                local.copy_(whole[tuple(slice(*extent) for extent in box)])


def first_matrix(
    name: str,
    shape: tuple[int, ...],
    fan_in: int,
    num_layers: int,
    seed: int,
    expert: int | None = None,
) -> Tensor:
    """The initial values of a matrix, or with ``expert`` of that expert's matrix.

    The values depend on the arguments and on nothing else.
    """
    std = _std(name, fan_in, num_layers)
    return _normal(name if expert is None else f"{name}/{expert}", shape, std, seed)


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias, by its name: the biases of experts have two dims."""
    return name.endswith(".bias") or name.rsplit(".", 1)[-1] in ("b_gate", "b_up", "b_down")


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix inside the network, or a stack of such matrices, one for each
    expert.

    Routers are; embedding, head, norms and biases are not, and neither is a matrix of one row or
    column, as the gate of shared experts. This is the division of Moonlight (Liu et al., arXiv
    2502.16982) and of GLM-4.5 (arXiv 2508.06471): what Muon updates, and what it leaves to AdamW.
    """
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if len(shape) < 2 or is_bias(name) or last in ("embed", "head"):
        return False
    return min(shape[-2:]) > 1


def is_second_of_adapter(name: str) -> bool:
    """Whether a parameter is the second matrix of an adapter: with zeros the adapter adds nothing
    (LoRA, Hu et al., arXiv 2106.09685, section 4.1)."""
    return ".lora." in name and name.endswith("b")


def _std(name: str, fan_in: int, num_layers: int) -> float:
    if ".lora." in name:  # the variance of moe.add_lora's uniform numbers
        return 1 / math.sqrt(3 * fan_in)
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last in ("embed", "router"):
        return 0.02
    std = 1 / math.sqrt(fan_in)
    return std / math.sqrt(2 * num_layers) if last in ("wo", "w_down") else std


def _normal(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(std=std, generator=generator)
