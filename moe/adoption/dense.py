"""The dense feed-forward modules of a model, known by the shapes of their linear layers.

Legend: D d_model, F d_ff.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.layer import MoELayer

_NAMES = {"mlp", "ffn", "feed_forward", "feedforward", "ff"}


class Matrix(NamedTuple):
    """A linear layer of a feed-forward module."""

    name: str
    """In the feed-forward module."""
    module: nn.Module
    inputs: int
    outputs: int

    def weight_DF(self) -> Tensor:
        """[inputs, outputs]: a view of the weight as experts have it."""
        weight = self.module.get_parameter("weight")
        return weight if _stored_by_inputs(self.module) else weight.t()

    @property
    def bias(self) -> Tensor | None:
        """[outputs], where there is one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias


class DenseMLP(NamedTuple):
    """A feed-forward module: one or two layers D -> F, and one F -> D."""

    name: str
    """In the model."""
    module: nn.Module
    ups: tuple[Matrix, ...]
    """Two for a gated module, which of them is the gate's being unknown."""
    down: Matrix

    @property
    def d_model(self) -> int:
        """D."""
        return self.down.outputs

    @property
    def d_ff(self) -> int:
        """F."""
        return self.down.inputs


def _stored_by_inputs(module: nn.Module) -> bool:
    """Whether a module is a Conv1D of ``transformers``, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _matrix(name: str, module: nn.Module) -> Matrix | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if isinstance(module, nn.Linear):
        return Matrix(name, module, weight.shape[1], weight.shape[0])
    if _stored_by_inputs(module):
        return Matrix(name, module, *weight.shape)
    return None


def dense_mlps(model: nn.Module) -> list[DenseMLP]:
    """The feed-forward modules of a model, in order, those of MoE blocks left out."""
    mlps: list[DenseMLP] = []
    passed: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in passed):
            continue
        if isinstance(module, MoELayer) or "experts" in dict(module.named_children()):
            passed.append(f"{name}.")
            continue
        mlp = _dense_mlp(name, module) if name else None
        if mlp is not None:
            mlps.append(mlp)
            passed.append(f"{name}.")
    return mlps


def _dense_mlp(name: str, module: nn.Module) -> DenseMLP | None:
    """What a module is as a feed-forward module; None where it is another one.

    All its parameters are those of two or three linear layers, of the shapes of a feed-forward
    layer, and it takes one tensor.
    """
    matrices = [m for n, child in module.named_modules() if (m := _matrix(n, child)) is not None]
    own = {id(p) for matrix in matrices for p in matrix.module.parameters()}
    if len(matrices) not in (2, 3) or any(id(p) not in own for p in module.parameters()):
        return None
    *ups, down = _in_order(matrices)
    # Square matrices may be anything, as those of attention or a pooler: there the name tells.
    is_square = ups[0].inputs == ups[0].outputs and name.rpartition(".")[2] not in _NAMES
    same = all((up.inputs, up.outputs) == (down.outputs, down.inputs) for up in ups)
    if not same or is_square or not _takes_one_tensor(module):
        return None
    return DenseMLP(name, module, tuple(ups), down)


def _in_order(matrices: Sequence[Matrix]) -> list[Matrix]:
    """The matrix of another shape than the others at the end; the last of two."""
    if len(matrices) == 2:
        return list(matrices)
    shapes = [(matrix.inputs, matrix.outputs) for matrix in matrices]
    single = [i for i, shape in enumerate(shapes) if shapes.count(shape) == 1]
    last = single[0] if len(single) == 1 else len(matrices) - 1
    return [m for i, m in enumerate(matrices) if i != last] + [matrices[last]]


def _takes_one_tensor(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1


def chosen_mlps(
    model: nn.Module, modules: str | Iterable[str | int] | None, first_k_dense: int
) -> list[DenseMLP]:
    """The feed-forward modules that ``modules`` names, without the first ``first_k_dense``.

    Raises ValueError where there is none, with the modules that were looked at, and for a name or a
    number that fits none.
    """
    mlps = dense_mlps(model)
    if not mlps:
        raise ValueError(
            f"{type(model).__name__} must have feed-forward modules: linear layers D -> F (one, or "
            f"two with a gate) and F -> D in a module that takes one tensor; looked at "
            f"{_looked_at(model)}"
        )
    if modules is not None:
        wanted = [modules] if isinstance(modules, str) else list(modules)
        for each_wanted in wanted:
            if not any(_fits(i, mlp, each_wanted) for i, mlp in enumerate(mlps)):
                names = ", ".join(mlp.name for mlp in mlps[:3])
                raise ValueError(
                    f"modules ({each_wanted}) must be a number below {len(mlps)}, or a pattern of "
                    f"names of feed-forward modules: {names}{', ...' if len(mlps) > 3 else ''}"
                )
        mlps = [m for i, m in enumerate(mlps) if any(_fits(i, m, want) for want in wanted)]
    if not 0 <= first_k_dense < len(mlps):
        raise ValueError(
            f"first_k_dense ({first_k_dense}) must be from 0 to {len(mlps) - 1}: "
            f"{len(mlps)} feed-forward modules are chosen, and one must be replaced"
        )
    return mlps[first_k_dense:]


def _fits(number: int, mlp: DenseMLP, wanted: str | int) -> bool:
    if isinstance(wanted, str):
        return fnmatchcase(mlp.name, wanted)
    return number == wanted


def _looked_at(model: nn.Module) -> str:
    """Modules with two or more linear layers of their own, for an error."""
    names = [
        f"{name or 'the model'} ({type(module).__name__}: {', '.join(_shapes(module))})"
        for name, module in model.named_modules()
        if len(list(_shapes(module))) > 1
    ]
    return "; ".join(names[:3]) or "no module with two linear layers"


def _shapes(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_children():
        matrix = _matrix(name, child)
        if matrix is not None:
            yield f"{name} {matrix.inputs} -> {matrix.outputs}"


@torch.no_grad()
def output_in_float64(mlp: DenseMLP, x_TD: Tensor) -> Any:
    """What the module gives for [T, D] in float64, without dropout; the module is not changed."""
    wide = {name: p.detach().double() for name, p in mlp.module.named_parameters()}
    wide |= {n: b.double() if b.is_floating_point() else b for n, b in mlp.module.named_buffers()}
    training = {module: module.training for module in mlp.module.modules()}
    mlp.module.eval()
    try:
        return torch.func.functional_call(mlp.module, wide, (x_TD,))
    finally:
        for module, was in training.items():
            module.training = was
