"""Which arrays of ours a checkpoint of another project has: by the names of its own arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt.rewrite import SourceArray
from convoy.convert.formats.rules import QKV, Kind, Layout, Rule, lay_out
from pretrain.errors import InputError
from pretrain.state import MODEL, feed_forward, is_expert_matrix


class _Match(NamedTuple):
    name: str
    rule: Rule
    slot: str
    layer: int | None
    expert: int | None


@dataclass(frozen=True)
class Recognized:
    """A checkpoint of theirs as arrays of ours."""

    ours: dict[str, SourceArray]
    layout: Layout


class _Matcher:
    """The names that the rules of a kind can make."""

    def __init__(self, kind: Kind) -> None:
        self.plain: dict[str, tuple[Rule, str]] = {}
        self.patterns: list[tuple[re.Pattern[str], Rule, str]] = []
        for slot in kind.slots():
            for rule in kind.rules:
                if not kind.holds(rule, slot):
                    continue
                template = kind.naming.of(rule, slot)
                if "{" not in template:
                    self.plain.setdefault(template, (rule, slot))
                    continue
                text = re.escape(template)
                for mark in ("layer", "expert"):
                    text = text.replace(re.escape("{" + mark + "}"), rf"(?P<{mark}>0|[1-9]\d*)", 1)
                self.patterns.append((re.compile(text), rule, slot))

    def match(self, name: str) -> _Match | None:
        if name in self.plain:
            return _Match(name, *self.plain[name], None, None)
        for pattern, rule, slot in self.patterns:
            hit = pattern.fullmatch(name)
            if hit is not None:
                numbers = hit.groupdict()
                layer, expert = (
                    None if numbers.get(mark) is None else int(numbers[mark])
                    for mark in ("layer", "expert")
                )
                return _Match(name, rule, slot, layer, expert)
        return None


def strangers(kind: Kind, names: Iterable[str]) -> list[str]:
    """The names that no rule of a kind makes, in order."""
    matcher = _Matcher(kind)
    return sorted(name for name in names if matcher.match(name) is None)


def recognize(
    kind: Kind, theirs: Mapping[str, SourceArray], where: str, num_heads: int | None = None
) -> Recognized:
    """A checkpoint's arrays as arrays of ours.

    Args:
        kind: how the checkpoint names and lays out a model.
        theirs: the arrays of the checkpoint.
        where: the checkpoint, for errors.
        num_heads: query heads, for a kind that has queries, keys and values in one array.

    Raises InputError, one line, naming the array, for an array that the kind does not know, an
    expert or a layer that is missing, and shapes or dtypes that do not make up a model.
    """
    matcher = _Matcher(kind)
    groups: dict[tuple[str, str], list[_Match]] = {}
    used: set[str] = set()
    for name in theirs:
        match = matcher.match(name)
        if match is None:
            raise InputError(f"{where}: array {name} is of no model that is known")
        used.add(match.rule.theirs)
        for path in match.rule.paths:
            groups.setdefault((match.slot, path), []).append(match)
    ours = {
        slot + path: _array_of(theirs, path, matches, where)
        for (slot, path), matches in groups.items()
    }
    _cut_fused(ours, groups, theirs, where)
    known = replace(kind, rules=tuple(rule for rule in kind.rules if rule.theirs in used))
    layout = lay_out(known, ours, num_heads)
    _check_same(theirs, layout, where)
    _check_whole(ours, where)
    return Recognized(ours, layout)


def _array_of(
    theirs: Mapping[str, SourceArray], path: str, matches: list[_Match], where: str
) -> SourceArray:
    """The array of ours that some arrays of theirs make up; of one that lies beside others in
    theirs the shape is still that of all of them."""
    first = matches[0]
    array = theirs[first.name]
    shape = list(array.shape)
    if first.rule.turned:
        shape[-2:] = reversed(shape[-2:])
    if first.expert is not None:
        experts = sorted({match.expert for match in matches if match.expert is not None})
        if experts != list(range(len(experts))):
            missing = min(set(range(len(experts))) - set(experts))
            raise InputError(
                f"{where}: expert {missing} of {path} is missing; {len(experts)} others are there, "
                f"up to expert {experts[-1]}"
            )
        shape.insert(0, len(experts))
    if not path.startswith("layers/"):
        return SourceArray(tuple(shape), array.logical_dtype)
    if first.layer is None:
        layers = list(range(shape[0]))
    else:
        layers = sorted({match.layer for match in matches if match.layer is not None})
        shape.insert(0, len(layers))
    return SourceArray(tuple(shape), array.logical_dtype, (), {"layers": layers})


def _cut_fused(
    ours: dict[str, SourceArray],
    groups: Mapping[tuple[str, str], list[_Match]],
    theirs: Mapping[str, SourceArray],
    where: str,
) -> None:
    """Give arrays that lie side by side in theirs their own sizes."""
    for (slot, path), matches in groups.items():
        rule = matches[0].rule
        if len(rule.paths) == 1:
            continue
        array = ours[slot + path]
        dim = len(array.shape) - (1 if is_expert_matrix(MODEL + path) else 2)
        size = _share(ours, slot, path, array.shape[dim], rule, f"{where}: {matches[0].name}")
        shape = (*array.shape[:dim], size, *array.shape[dim + 1 :])
        ours[slot + path] = replace(array, shape=shape)


def _share(
    ours: Mapping[str, SourceArray], slot: str, path: str, total: int, rule: Rule, where: str
) -> int:
    if rule.paths != QKV:
        size, rest = divmod(total, len(rule.paths))
        down = ours.get(slot + path.replace("w_gate", "w_down").replace("w_up", "w_down"))
        inner = None
        if down is not None:
            inner = down.shape[-2] if is_expert_matrix(MODEL + path) else down.shape[-1]
        if rest or inner not in (None, size):
            raise InputError(
                f"{where} has {total} rows for a hidden size of {inner}: gate and up must lie side "
                f"by side; of Megatron, gated_linear_unit must be true (--swiglu)"
            )
        return size
    wo = ours.get(f"{slot}layers/attention/wo/weight")
    if wo is None:
        raise InputError(f"{where} has queries, keys and values, and the output matrix is missing")
    queries = wo.shape[-1]
    keys, rest = divmod(total - queries, 2)
    if rest or keys < 1:
        raise InputError(f"{where} has {total} rows, which queries of {queries} rows do not leave "
                         f"even for keys and values")  # fmt: skip
    return queries if path == QKV[0] else keys


def _check_same(theirs: Mapping[str, SourceArray], layout: Layout, where: str) -> None:
    for name in sorted(layout.arrays.keys() | theirs.keys()):
        has, needs = theirs.get(name), layout.arrays.get(name)
        if has is None:
            raise InputError(f"{where}: array {name} is missing: other layers or experts have it")
        if needs is None:
            raise InputError(f"{where}: array {name} does not belong to the model of the others")
        if (has.shape, has.logical_dtype) != (needs.shape, needs.logical_dtype):
            raise InputError(
                f"{where}: {name} is {has.logical_dtype} {list(has.shape)}; the other layers need "
                f"{needs.logical_dtype} {list(needs.shape)}"
            )


def _check_whole(ours: Mapping[str, SourceArray], where: str) -> None:
    """No layer, and of no feed-forward a matrix, is missing."""
    layers = {
        name: set(array.attributes["layers"])
        for name, array in ours.items()
        if "layers" in array.attributes
    }
    every = set[int]().union(*layers.values())
    sparse, dense = (
        set[int]().union(*(of for name, of in layers.items() if mark in name))
        for mark in ("/layers/moe/", "/layers/ffn/")
    )
    for name, own in layers.items():
        needed = sparse if "/moe/" in name else dense if "/ffn/" in name else every
        missing = sorted(needed - own)
        if missing:
            raise InputError(f"{where}: layer {missing[0]} of {name} is missing")
    if every and every != set(range(len(every))):
        gap = min(set(range(len(every))) - every)
        raise InputError(f"{where}: layer {gap} is missing; there are others up to {max(every)}")
    for name in ours:
        matrix = feed_forward(name)
        if matrix is None:
            continue
        for role in ("gate", "up", "down"):
            other = name.replace(f"w_{matrix.role}", f"w_{role}")
            if other not in ours:
                raise InputError(f"{where}: {name} is there and {other} is missing")
