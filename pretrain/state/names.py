"""Names of the logical tree: of a module's parameters, and of the arrays that stack their layers.

The parameter ``layers.3.moe.experts.w_gate`` is index 3 of the array
``model/layers/moe/experts/w_gate``, whose first dim is the layer. Experts' arrays have the expert
as their second dim. Layers of multi-token prediction have arrays of their own: the parameter
``mtp.layers.0.moe.experts.w_gate`` is index 0 of ``model/mtp/layers/moe/experts/w_gate``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MODEL = "model/"
"""Parameters and buffers begin so."""
EXPERT_BIAS = "model/layers/moe/router/expert_bias"
ROUTER = "model/layers/moe/router/weight"
MTP = "model/mtp/"
"""Arrays of multi-token prediction begin so."""

_NO_WEIGHTS = ("optimizer/", "optim/", "rng/", "residual/")
_LAYER = re.compile(r"(?:(?P<before>.+?)/)??layers/(?P<layer>0|[1-9][0-9]*)/(?P<after>.+)")
_FEED_FORWARD = re.compile(
    rf"{MODEL}layers/(moe/experts|moe/shared_experts|ffn)/([wb])_(gate|up|down)"
    r"(?:/(?:weight|bias))?"
)


def array_path(parameter: str) -> str:
    """The name of a parameter as a path: ``layers.3.norm.weight`` is ``layers/3/norm/weight``."""
    return parameter.replace(".", "/")


def split_layer(path: str) -> tuple[str, int | None]:
    """The path of the stacked array, and the layer: ``layers/3/norm/weight`` gives
    ``("layers/norm/weight", 3)``. The layer is None where the path has none."""
    match = _LAYER.fullmatch(path)
    if match is None:
        return path, None
    before, layer, after = match.group("before", "layer", "after")
    return "/".join(part for part in (before, "layers", after) if part), int(layer)


def parameter_name(array: str, layer: int | None = None) -> str:
    """The name of a parameter of the model: the inverse of :func:`array_path` and
    :func:`split_layer` for arrays that begin with ``model/``."""
    path = array.removeprefix(MODEL)
    if layer is not None:
        before, _, after = path.rpartition("layers/")
        path = f"{before}layers/{layer}/{after}"
    return path.replace("/", ".")


def name_in_layer(array: str) -> str | None:
    """The name of a parameter within its layer: ``attention.wq.weight`` of
    ``model/layers/attention/wq/weight``. None for an array that is of no layer."""
    array = in_decoder(array)
    inner = array.removeprefix(f"{MODEL}layers/")
    return None if inner == array else inner.replace("/", ".")


def in_decoder(array: str) -> str:
    """Of an array of multi-token prediction, the array of the decoder's layers that has the same
    part of them; of any other array, its own name."""
    return array.replace(MTP, MODEL, 1)


def weight_names(names: list[str]) -> list[str]:
    """Of a checkpoint's arrays, the parameters and buffers: what begins with ``model/`` or, where
    nothing does, what no optimizer and no rank's random state has."""
    of_model = [name for name in names if name.startswith(MODEL)]
    return of_model or [name for name in names if not name.startswith(_NO_WEIGHTS)]


class FeedForward(NamedTuple):
    """What the name of a feed-forward's array says."""

    room: str
    """``moe/experts``, ``moe/shared_experts`` or, of a dense layer, ``ffn``."""
    kind: str
    """``w``, a matrix, or ``b``, a bias."""
    role: str
    """``gate``, ``up`` or ``down``."""


def feed_forward(array: str) -> FeedForward | None:
    """Which matrix or bias of a feed-forward an array is; None for any other array."""
    match = _FEED_FORWARD.fullmatch(in_decoder(array))
    return None if match is None else FeedForward(*match.groups())


def is_expert_matrix(array: str) -> bool:
    """Whether an array is the matrices of experts, [layer, expert, in, out]."""
    found = feed_forward(array)
    return found is not None and (found.room, found.kind) == ("moe/experts", "w")


def has_expert_dim(array: str) -> bool:
    """Whether the second dim of an array is the expert: experts' own, and the router's."""
    if in_decoder(array) in (ROUTER, EXPERT_BIAS):
        return True
    found = feed_forward(array)
    return found is not None and found.room == "moe/experts"


def dense_name(array: str) -> str:
    """Of an array of experts' matrices, the array of the dense layers that they are copies of, [L,
    out, in]; of any other array, its own name."""
    found = feed_forward(array)
    if found is None or not is_expert_matrix(array):
        return array
    before = array[: array.index("layers/")]
    return f"{before}layers/ffn/w_{found.role}/weight"
