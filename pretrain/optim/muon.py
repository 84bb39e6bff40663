"""Muon: momentum that is orthogonalized, for matrices; AdamW for the rest.

Legend: B matrices of one shape, M rows, N columns, E experts.

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/, 2024) replaces the momentum of a
matrix, U S V^T, by about U V^T: an update that is equally long in all directions. Moonlight (Liu et
al., arXiv 2502.16982, section 2.2) adds weight decay, and scales the update to the root mean square
of AdamW's: learning rate and weight decay are then those of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from parallel import ShardLayout, Topology, WholeMatrices, local_shard
from pretrain.model import is_hidden_matrix
from pretrain.optim.adamw import build_adamw
from pretrain.optim.config import MOMENTUM, NEWTON_SCHULZ_STEPS, MuonConfig
from pretrain.optim.state import Surroundings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial of a Newton-Schulz step; from Jordan's post."""
UPDATE_RMS = 0.2
"""The root mean square of the update of a matrix of full rank, as a ratio to the learning rate: an
update is scaled by 0.2 · sqrt(max(rows, columns)) (Moonlight, section 2.2), about as AdamW's."""
_LEAST_NORM = 1e-7
"""Of a matrix before the first step, which is divided by its norm; a matrix of zeros stays so."""


def orthogonalized(x_BMN: Tensor, steps: int) -> Tensor:
    """About U V^T of each matrix U S V^T, by Newton-Schulz steps in the dtype of ``x_BMN``.

    As torch.optim.Muon does it: five steps bring singular values between 0.001 and 1, as shares of
    the matrix's Frobenius norm, to about 0.7 to 1.2, and smaller ones part of the way.
    """
    a, b, c = COEFFICIENTS
    # The shorter side is that of the products M x M.
    x = x_BMN.mT if x_BMN.shape[1] > x_BMN.shape[2] else x_BMN
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / norms.clamp_min(_LEAST_NORM).to(x.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if x_BMN.shape[1] > x_BMN.shape[2] else x


class Muon(torch.optim.Optimizer):
    """Muon over hidden matrices and AdamW over the rest, as one optimizer.

    The numbers do not depend on the layout but for rounding: a matrix is put together from its
    slices, orthogonalized by one rank, and taken apart, see
    :class:`parallel.WholeMatrices`. A matrix without a gradient counts as one with zeros, since all
    ranks must take part.

    Args:
        model: on its device; parameters may be DTensors.
        config: the rates and steps.
        around: ranks and dtypes.
    """

    def __init__(self, model: nn.Module, config: MuonConfig, around: Surroundings) -> None:
        self.config, self.exact = config, around.exact
        self.matrices = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and is_hidden_matrix(name, parameter.shape)
        }
        group = {"params": list(self.matrices.values()), "weight_decay": config.weight_decay}
        super().__init__([group], {"lr": config.lr})
        for parameter in self.matrices.values():
            self.state[parameter] = {MOMENTUM: torch.zeros_like(parameter)}
        self.adamw = build_adamw(model, config, around.exact, without=self.matrices)
        # One optimizer to its callers: rates are set, and states are found, in one place.
        self.param_groups += self.adamw.param_groups
        self.state.update(self.adamw.state)
        self.adamw.state = self.state
        self._whole = _whole_matrices(self.matrices, config, around)

    def moments_of(self, name: str, parameter: Tensor) -> tuple[str, ...]:
        """The names of a parameter's moments, by the parameter's name and global shape."""
        hidden = is_hidden_matrix(name, parameter.shape)
        return self.config.matrix_moments if hidden else self.config.other_moments

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; every rank that holds parts of them must call."""
        assert closure is None
        self.adamw.step()
        if not self.matrices:
            return
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        momentum = self.config.momentum
        weights = {name: _stacked(p) for name, p in self.matrices.items()}
        means = {name: _stacked(self.state[p][MOMENTUM]) for name, p in self.matrices.items()}
        gradients = {
            name: torch.zeros_like(weights[name]) if p.grad is None else _stacked(p.grad)
            for name, p in self.matrices.items()
        }
        torch._foreach_lerp_(list(means.values()), list(gradients.values()), 1 - momentum)
        torch._foreach_mul_(list(weights.values()), 1 - lr * decay)

        def ahead(name: str, experts: slice) -> Tensor:
            return gradients[name][experts].lerp(means[name][experts], momentum)

        def update(name: str, experts: slice, direction: Tensor) -> None:
            scale = UPDATE_RMS * math.sqrt(max(self.matrices[name].shape[-2:]))
            weight = weights[name][experts]
            weight.add_(direction.to(weight), alpha=-lr * scale)

        self._whole.apply(_one_by_one if self.exact else _together, ahead, update)


def _together(x_BMN: Tensor) -> Tensor:
    return orthogonalized(x_BMN, NEWTON_SCHULZ_STEPS)


def _one_by_one(x_BMN: Tensor) -> Tensor:
    """As :func:`_together`, with equal bits of a matrix beside any others: small products round
    otherwise where they begin elsewhere in a cache line."""
    return torch.cat([_together(matrix) for matrix in x_BMN.split(1)])


def _stacked(x: Tensor) -> Tensor:
    """The local shard as [E, M, N] of what is here; a matrix is a stack of one."""
    local = local_shard(x).detach()
    return local if local.ndim == 3 else local.unsqueeze(0)


def _whole_matrices(
    matrices: Mapping[str, nn.Parameter], config: MuonConfig, around: Surroundings
) -> WholeMatrices:
    layouts, dims = around.layouts, around.dims
    if layouts is None:
        layouts = {
            name: ShardLayout(tuple(p.shape), ((),) * p.ndim, Topology())
            for name, p in matrices.items()
        }
    device = around.device
    if device is None:
        device = next((p.device for p in matrices.values()), torch.device("cpu"))
    return WholeMatrices(
        {name: layouts[name] for name in matrices},
        lambda rows, columns: sum(m * n * k for m, n, k in config.matrix_products(rows, columns)),
        None if dims is None else dims.stage_mesh.get_group(),
        device,
        getattr(torch, config.products_dtype(around.compute)),
    )
