"""Declarations: how a project calls the arrays of a decoder, and how it lays them out.

A declaration is a list of rules. It is read in one direction: from the arrays of ours to those of
theirs, their names, shapes and links. To read a checkpoint of theirs, its names tell what arrays
of ours there are (:mod:`convoy.convert.formats.recognition`), the declaration says of these what
theirs must be, and the checkpoint must be just that.

Legend: L layers, E experts, D d_model, F d_ff, H query heads, G key-value heads, C head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Literal, NamedTuple

from ckpt.rewrite import SourceArray
from convoy.convert.formats.links import Link
from pretrain.errors import InputError
from pretrain.state import MODEL, is_expert_matrix

OPTIMIZER = "optimizer/"
"""Moments begin so; the moment's name follows, and the path of the parameter."""
ADAM = ("exp_avg", "exp_avg_sq")
QKV = tuple(f"layers/attention/w{which}/weight" for which in "qkv")
"""Queries, keys and values, each [L, heads C, D]."""
_QK = ("wq", "wk")
_LAYER, _EXPERT = "{layer}", "{expert}"
_DENSE, _SPARSE = "layers/ffn/w_gate/weight", "layers/moe/router/weight"
Extent = tuple[int, int]
Part = tuple[str, SourceArray]


class Rule(NamedTuple):
    """One array of theirs: its name, and the arrays of ours that it has.

    The name may have ``{layer}`` and ``{expert}``. Without them an array of theirs has all layers
    or all experts, in its first dims. An array of ours is named by its path below ``model/``.
    """

    theirs: str
    ours: str | tuple[str, ...]
    """Where there are several, theirs has them side by side: experts' matrices along d_ff, all
    others along their rows."""
    turned: bool = False
    """Whether theirs has the last two dims in the other order."""
    by_group: bool = False
    """Whether queries, keys and values lie side by side for each key-value head."""
    of: Literal["all", "weights", "moments", "buffer"] = "all"
    """What is laid out so. A buffer has no moments."""
    where: Literal["", "dense", "sparse"] = ""
    """Only in layers without experts, or with experts."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The arrays of ours."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class Naming:
    """How the name of a parameter, ``{p}``, becomes the names of its weights and its moments."""

    weight: str = "{p}"
    moment: str = "{p}.{moment}"
    buffer: str = "{p}"
    moments: tuple[str, ...] = ADAM
    """What the format can hold."""

    def of(self, rule: Rule, slot: str) -> str:
        """The template of a name: ``{layer}`` and ``{expert}`` are still in it."""
        if slot != MODEL:
            moment = slot.removeprefix(OPTIMIZER).removesuffix("/")
            return self.moment.replace("{moment}", moment).replace("{p}", rule.theirs)
        template = self.buffer if rule.of == "buffer" else self.weight
        return template.replace("{p}", rule.theirs)


@dataclass(frozen=True)
class Kind:
    """One way in which a format names and lays out a model."""

    rules: tuple[Rule, ...]
    naming: Naming = field(default_factory=Naming)

    def slots(self) -> list[str]:
        """What an array of ours may begin with: ``model/``, and the moments' prefixes."""
        return [MODEL, *(f"{OPTIMIZER}{moment}/" for moment in self.naming.moments)]

    def holds(self, rule: Rule, slot: str) -> bool:
        """Whether a rule is for arrays of a slot."""
        kinds = ("all", "weights", "buffer") if slot == MODEL else ("all", "moments")
        return slot in self.slots() and rule.of in kinds


def split_slot(array: str) -> tuple[str, str]:
    """``optimizer/exp_avg/embed/weight`` is ``("optimizer/exp_avg/", "embed/weight")``. The slot is
    empty for what is neither a weight nor a moment."""
    if array.startswith(MODEL):
        return MODEL, array.removeprefix(MODEL)
    if array.startswith(OPTIMIZER):
        moment, _, path = array.removeprefix(OPTIMIZER).partition("/")
        return f"{OPTIMIZER}{moment}/", path
    return "", array


class Heads(NamedTuple):
    """Query heads, key-value heads, and the size of one head."""

    H: int
    G: int
    C: int

    def rows(self) -> list[tuple[Extent, ...]]:
        """Of queries, keys and values, the rows in the one matrix that has all three: for each
        key-value head its query heads, its keys and its values."""
        queries = self.H // self.G * self.C
        stride, starts = queries + 2 * self.C, (0, queries, queries + self.C)
        return [
            tuple((g * stride + first, g * stride + first + count) for g in range(self.G))
            for first, count in zip(starts, (queries, self.C, self.C), strict=True)
        ]


class Layout(NamedTuple):
    """What a declaration makes of the arrays of ours."""

    arrays: dict[str, SourceArray]
    """Of theirs."""
    links: list[Link]
    unnamed: list[str]
    """Arrays of ours that no rule names, or not all layers of them."""


def lay_out(kind: Kind, ours: Mapping[str, SourceArray], num_heads: int | None = None) -> Layout:
    """The arrays of theirs that a decoder's arrays, and their moments, become.

    Of several rules for a layer of an array the first counts. Raises InputError where heads are
    needed to lay queries, keys and values side by side, and cannot be told.
    """
    made = Layout({}, [], [])
    layers = {name: _layer_numbers(name, array) for name, array in ours.items()}
    left = {name: dict.fromkeys(range(len(numbers))) for name, numbers in layers.items()}
    dense, sparse = (set(layers.get(MODEL + path, ())) for path in (_DENSE, _SPARSE))
    for slot in dict.fromkeys(split_slot(name)[0] for name in ours):
        for rule in kind.rules:
            names = [slot + path for path in rule.paths]
            if not kind.holds(rule, slot) or not all(name in ours for name in names):
                continue
            template = kind.naming.of(rule, slot)
            asked = {"": None, "dense": dense, "sparse": sparse}[rule.where]
            picked = [i for i in left[names[0]] if asked is None or layers[names[0]][i] in asked]
            if not picked or (_LAYER not in template and len(picked) < len(layers[names[0]])):
                continue
            for name in names:
                left[name] = {i: None for i in left[name] if i not in picked}
            parts = [(name, ours[name]) for name in names]
            rows = _rows(rule, parts, ours, num_heads)
            _lay_one(template, rule, parts, rows, {i: layers[names[0]][i] for i in picked}, made)
    made.unnamed.extend(name for name in ours if left[name])
    return made


def _layer_numbers(name: str, array: SourceArray) -> Sequence[int]:
    """The layers that an array has; one index, of no meaning, where it is of no layer."""
    if not split_slot(name)[1].startswith("layers/"):
        return (0,)
    numbers = array.attributes.get("layers", range(array.shape[0]))
    return tuple(int(number) for number in numbers)


def _fused_dim(rule: Rule) -> int:
    """The dim of ours, from the end, along which several arrays lie side by side."""
    return -1 if is_expert_matrix(MODEL + rule.paths[0]) else -2


def _rows(
    rule: Rule, parts: Sequence[Part], ours: Mapping[str, SourceArray], num_heads: int | None
) -> list[tuple[Extent, ...]]:
    """By array of ours, where in the array of theirs its stretches lie."""
    if rule.by_group:
        return heads_of(ours, num_heads).rows()
    if len(parts) == 1:
        return [()]
    ends = [0]
    for _, array in parts:
        ends.append(ends[-1] + array.shape[_fused_dim(rule)])
    return [(extent,) for extent in pairwise(ends)]


def _lay_one(
    template: str,
    rule: Rule,
    parts: Sequence[Part],
    rows: Sequence[tuple[Extent, ...]],
    layers: Mapping[int, int],
    made: Layout,
) -> None:
    """Add the arrays that one rule makes of the layers ``layers``, by index, of some arrays."""
    shape = list(parts[0][1].shape)
    dims, fused = len(shape), _fused_dim(rule)
    if len(parts) > 1:
        shape[fused] = sum(array.shape[fused] for _, array in parts)
    gone = [dim for dim, mark in enumerate((_LAYER, _EXPERT)) if mark in template]
    axes = [dim for dim in range(dims) if dim not in gone]
    if rule.turned:
        axes[-2:] = reversed(axes[-2:])
    experts = range(shape[1]) if _EXPERT in template else (0,)
    for (layer, number), expert in product(layers.items() if 0 in gone else ((0, 0),), experts):
        name = template.format(layer=number, expert=expert)
        made.arrays[name] = SourceArray(tuple(shape[d] for d in axes), parts[0][1].logical_dtype)
        index = {0: layer, 1: expert}
        for (ours, array), extents in zip(parts, rows, strict=True):
            own = [
                (index[d], index[d] + 1) if d in gone else (0, array.shape[d]) for d in range(dims)
            ]
            their, start = list(own), 0
            for extent in extents or ((0, 0),):
                if extents:
                    their[fused], size = extent, extent[1] - extent[0]
                    own[fused], start = (start, start + size), start + size
                box = tuple(their[d] for d in axes)
                made.links.append(Link(name, box, ours, tuple(own), tuple(axes)))


def heads_of(ours: Mapping[str, SourceArray], num_heads: int | None) -> Heads:
    """The heads of a decoder with grouped-query attention.

    Args:
        ours: the arrays of the decoder.
        num_heads: query heads; not needed where queries are normalized by head.

    Raises InputError where heads cannot be told, or do not fit the arrays.
    """
    queries, keys = (ours[f"{MODEL}layers/attention/{name}/weight"].shape[-2] for name in _QK)
    q_norm = ours.get(f"{MODEL}layers/attention/q_norm/weight")
    if q_norm is not None and (q_norm.shape[-1] < queries or num_heads is None):
        size = q_norm.shape[-1]
        if num_heads not in (None, queries // size):
            raise InputError(
                f"--num-heads ({num_heads}) must be {queries // size}: heads have {size} numbers, "
                f"and all of them {queries}"
            )
    elif num_heads is None:
        raise InputError(
            f"--num-heads must be given: {queries} numbers of all query heads do not tell how many "
            f"heads there are"
        )
    elif num_heads < 1 or queries % num_heads:
        raise InputError(f"--num-heads ({num_heads}) must divide {queries}, the size of all heads")
    else:
        size = queries // num_heads
    H, G = queries // size, keys // size
    if keys % size or queries % size or G < 1 or H % G:
        raise InputError(
            f"--num-heads ({num_heads or H}) must fit query heads of {queries} numbers with "
            f"key-value heads of {keys}: key-value heads would not come out even"
        )
    return Heads(H, G, size)
