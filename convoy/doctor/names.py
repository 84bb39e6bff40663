"""Names of tensors in the checkpoints of many trainers, read as parts of a mixture of experts.

Legend: L layers, E experts, D d_model, F d_ff.

Nothing here asks for a whole model: a corrupted checkpoint has holes, and its names are still read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.rewrite import SourceArray

WEIGHT, MASTER, MEAN, SQUARE, COUNT = "weight", "master", "exp_avg", "exp_avg_sq", "step"
MOMENTUM = "momentum_buffer"
"""What an array is of a parameter: its number in the model, the float32 number that the optimizer
updates, the two moments of Adam, the count of the optimizer's updates, and Muon's one moment."""
GATE, UP, DOWN, ROUTER, BIAS = "gate", "up", "down", "router", "expert_bias"
MATRICES = (GATE, UP, DOWN)
"""The matrices of an expert."""


@dataclass(frozen=True)
class Slot:
    """Where one matrix or vector of the model is: an index of an array's first dims."""

    array: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    """What the index leaves, as it is stored."""
    turned: bool = False
    """Whether the matrix is stored as [out, in]."""
    half: int | None = None
    """Of gate and up in one matrix: 0 is the gate, 1 is up."""


class Part(NamedTuple):
    """Which part of a model a slot is."""

    what: str
    role: str
    """One of :data:`MATRICES`, ``router``, ``expert_bias``, or any other name within a layer."""
    layer: int | None
    expert: int | None


_MOMENTS = {
    "exp_avg": MEAN, "exp_avg_sq": SQUARE, "fp32": WEIGHT, "fp32_param": MASTER, "param": MASTER,
    "step": COUNT, "momentum_buffer": MOMENTUM,
}  # fmt: skip
_WHAT = "|".join(sorted(_MOMENTS, key=len, reverse=True))
_BEFORE = re.compile(rf"(?:chained_\d+\.)?(?:optimizers?|optim|zero)\.(?:state\.)?({_WHAT})\.(.+)")
_AFTER = re.compile(rf"(?:optimizers?|optim|zero)\.(?:state\.)?(.+)\.({_WHAT})(?:\.pt)?")
_OPTIMIZER = re.compile(
    r"(?:chained_\d+\.)?(?:optimizers?|optim|opt_param_scheduler|lr_scheduler|dataloader|"
    r"train_state|rng_state|rng|residual)\b.*"
)
_PREFIX = re.compile(r"(?:(?:model|module|language_model|text_model|decoder|transformer)\.)+")
_LAYER = re.compile(r"(?:layers|h|blocks)\.(?:(\d+)\.)?(.+)")
_OF_MTP = re.compile(r"(?:mtp|mtp_\w+)\.(.+)")
_BLOCK = r"(?:mlp|block_sparse_moe|feed_forward|moe|ffn)"
_PROJECTIONS = {
    "gate_proj": GATE, "up_proj": UP, "down_proj": DOWN, "w_gate": GATE, "w_up": UP,
    "w_down": DOWN, "w1": GATE, "w3": UP, "w2": DOWN, "gate_up_proj": "both",
}  # fmt: skip
_AUTOMODEL = re.compile(r"mlp\.experts\.(gate_and_up_projs|down_projs)")
_NAMED = "|".join(sorted(_PROJECTIONS, key=len, reverse=True))
_OWN = re.compile(r"moe\.experts\.(w_gate|w_up|w_down)")
_GROUPED = re.compile(
    rf"{_BLOCK}\.(?:experts|routed_experts\.inner_experts)\.({_NAMED})(?:_E[A-Z]+)?(?:\.weight)?"
)
_SINGLE = re.compile(rf"{_BLOCK}\.experts\.(\d+)\.({_NAMED})(?:\.weight)?")
_MEGATRON = re.compile(
    r"mlp\.experts\.(?:experts|local_experts)\.(?:(\d+)\.)?linear_fc([12])\.weight(?:_([wv]))?"
)
_ROUTER = re.compile(rf"(?:{_BLOCK}\.(?:router(?:\.gate)?|gate(?:\.wg)?)|router)\.weight")
_BIAS = re.compile(
    rf"{_BLOCK}\.(?:(?:router|gate)\.)?(?:expert_bias(?:_E)?|e_score_correction_bias)"
)


def split_what(name: str) -> tuple[str, str] | None:
    """``(what, parameter)`` of a dotted name; None for what is of no parameter, such as a random
    state or a learning rate."""
    for pattern, order in ((_BEFORE, (1, 2)), (_AFTER, (2, 1))):
        match = pattern.fullmatch(name)
        if match is not None:
            return _MOMENTS[match[order[0]]], match[order[1]]
    return None if _OPTIMIZER.fullmatch(name) else (WEIGHT, name)


def slots_of(
    name: str, array: SourceArray, in_out: bool = False
) -> tuple[str, dict[Part, Slot]] | None:
    """The parts of the model that one array has, and the name of its parameter.

    Args:
        name: in the checkpoint, with dots or slashes.
        array: its shape; the attribute ``layers`` gives the numbers of stacked layers.
        in_out: whether a grouped ``gate_up_proj`` is stored as [E, in, out], as Llama 4's is.

    None for what is of no parameter.
    """
    read = split_what(name.replace("/", "."))
    if read is None:
        return None
    what, parameter = read
    plain = _PREFIX.sub("", parameter, count=1) if _PREFIX.match(parameter) else parameter
    of_mtp = _OF_MTP.fullmatch(plain)
    if of_mtp is not None:
        return parameter, {Part(what, f"mtp.{of_mtp[1]}", None, None): Slot(name, (), array.shape)}
    match = _LAYER.fullmatch(plain)
    if match is None:
        return parameter, {Part(what, plain, None, None): Slot(name, (), array.shape)}
    number, inner = match.groups()
    shape = array.shape
    if number is not None:
        leads: list[tuple[int, tuple[int, ...]]] = [(int(number), ())]
    else:
        rows = array.attributes.get("layers") or range(shape[0] if shape else 0)
        leads, shape = [(layer, (i,)) for i, layer in enumerate(rows)], shape[1:]
    made: dict[Part, Slot] = {}
    for layer, index in leads:
        for role, expert, slot in _in_layer(name, inner, index, shape, in_out):
            made[Part(what, role, layer, expert)] = slot
    return parameter, made


def _in_layer(
    name: str, inner: str, index: tuple[int, ...], shape: tuple[int, ...], in_out: bool
) -> list[tuple[str, int | None, Slot]]:
    """Role, expert and slot of everything that one array has of one layer."""
    role, expert, turned = _expert_matrix(inner, in_out)
    if role is None:
        if _ROUTER.fullmatch(inner):
            return [(ROUTER, None, Slot(name, index, shape))]
        if _BIAS.fullmatch(inner):
            return [(BIAS, None, Slot(name, index, shape))]
        return [(inner, None, Slot(name, index, shape))]
    if expert is not None or len(shape) < 3:
        numbered = [(expert, index, shape)]
    else:
        numbered = [(e, (*index, e), shape[1:]) for e in range(shape[0])]
    made: list[tuple[str, int | None, Slot]] = []
    for number, lead, left in numbered:
        if role == "both":
            made.append((GATE, number, Slot(name, lead, left, turned, 0)))
            made.append((UP, number, Slot(name, lead, left, turned, 1)))
        else:
            made.append((role, number, Slot(name, lead, left, turned)))
    return made


def _expert_matrix(inner: str, in_out: bool) -> tuple[str | None, int | None, bool]:
    """Role, expert where the name has it, and whether the matrix is stored as [out, in]."""
    match = _OWN.fullmatch(inner)
    if match is not None:
        return _PROJECTIONS[match[1]], None, False
    match = _AUTOMODEL.fullmatch(inner)
    if match is not None:
        return (DOWN if match[1] == "down_projs" else "both"), None, False
    match = _GROUPED.fullmatch(inner)
    if match is not None:
        return _PROJECTIONS[match[1]], None, not in_out
    match = _SINGLE.fullmatch(inner)
    if match is not None:
        return _PROJECTIONS[match[2]], int(match[1]), True
    match = _MEGATRON.fullmatch(inner)
    if match is not None:
        expert = None if match[1] is None else int(match[1])
        if match[2] == "2":
            return DOWN, expert, True
        return {"w": GATE, "v": UP}.get(match[3], "both"), expert, True
    return None, None, False


def matrix_shape(slot: Slot) -> tuple[int, ...]:
    """The shape of a slot as [in, out], of gate and up in one matrix the half."""
    if len(slot.shape) != 2:
        return slot.shape
    rows, columns = slot.shape[::-1] if slot.turned else slot.shape
    return (rows, columns // 2) if slot.half is not None else (rows, columns)


def plain_parameter(parameter: str) -> str:
    """The name of a parameter without what a trainer puts before it."""
    return _PREFIX.sub("", parameter, count=1)
