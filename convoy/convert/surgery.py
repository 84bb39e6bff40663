"""Changes of a model's experts and of their width: the weights and the spec change together.

Legend: L layers, E experts, D d_model, F d_ff, K top_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ckpt.format import TREE
from ckpt.rewrite import Described, Selected, Source, SourceInfo, changed
from convoy.convert.grown import (
    Upcycled,
    Values,
    Widened,
    misfit,
    upcycled_spec,
    weight_arrays,
    widened_sections,
)
from parallel.layout import Box
from pretrain.errors import InputError
from pretrain.spec import JobSpec, resolve_spec, stored_spec
from pretrain.state import MODEL, ROUTER, has_expert_dim, in_decoder, tokenizer_of

_KINDS = ("upcycle=NUM_EXPERTS", "drop=EXPERT,...", "duplicate=COPIES", "widen=COPIES")


class Surgery(NamedTuple):
    """A change: ``kind`` is upcycle, drop, duplicate or widen."""

    kind: str
    numbers: tuple[int, ...]


def parse_surgery(text: str) -> Surgery:
    """Read ``"drop=3,7"``. Raises InputError for any other text."""
    kind, _, value = text.partition("=")
    numbers = value.split(",")
    known = kind in ("upcycle", "drop", "duplicate", "widen")
    if not known or not all(n.isdecimal() for n in numbers) or (kind != "drop" and numbers[1:]):
        raise InputError(f"surgery ({text}) must be one of {', '.join(_KINDS)}")
    if kind in ("duplicate", "widen") and int(value) < 2:
        raise InputError(f"surgery ({text}): there must be at least 2 copies")
    return Surgery(kind, tuple(map(int, numbers)))


def operate(
    source: Source, surgery: Surgery, overrides: Sequence[str] = (), noise: float = 0.0
) -> tuple[Source, JobSpec]:
    """The weights and the spec of a model after a change of its experts. Optimizer moments are left
    out.

    ``drop`` removes experts. A token whose top_k experts were among the removed ones takes its next
    best experts, with the weights of these: with ``norm_topk_prob`` a token's weights sum to one
    again.

    ``duplicate`` puts the copies of an expert, and the copies of its router's row, side by side:
    copies stay in the expert's group. A token that chose an expert chooses all copies of the
    expert. ``top_k`` and ``topk_per_group`` are multiplied by the number of copies, each copy has
    an equal part of the weight, and the output does not change. (Normalization divides softmax
    scores, renormalized weights and a softmax of the chosen by the number of copies. For sigmoid
    scores that are not renormalized, ``route_scale`` is divided instead.) Equal copies would get
    equal gradients. With ``noise`` above 0 the copies' rows of the router, except the first, get
    normal noise of standard deviation ``noise`` times the row's root mean square. To keep the cost
    of a step, override ``moe.top_k`` with its old value; only noise then makes tokens choose
    different copies.

    ``upcycle`` makes a MoE of a dense model (Komatsuzaki et al., arXiv 2212.05055): every expert is
    a copy of the layer's feed-forward, the router has initial weights, and ``top_k`` is 2 unless it
    is overridden.

    ``widen`` multiplies ``d_ff`` of the experts, or of a dense model's layers. Every hidden unit is
    there several times, and the output does not change, with ``noise`` neither; see
    :class:`convoy.convert.grown.Widened`.

    Args:
        source: holds the spec of its model.
        surgery: the change.
        overrides: ``section.field=value`` of the new spec.
        noise: see above.

    Raises InputError for experts that the model does not have, and for a new spec that does not
    fit the new arrays.
    """
    if not source.info.spec.get("model"):
        how = " and SRC was saved by save_state_dict" if TREE in source.info.state else ""
        raise InputError(f"surgery needs a checkpoint that holds the spec of its model{how}")
    weights = Selected(source, {n: n for n in source.arrays if n.startswith(MODEL)})
    before = resolve_spec(stored_spec(source.info.spec), "the checkpoint's spec")
    if noise < 0 or (noise and surgery.kind not in ("duplicate", "widen")):
        raise InputError(f"--noise ({noise}) must be 0 but with duplicate and widen, and not below")
    made: Source
    if surgery.kind == "upcycle":
        number = surgery.numbers[0]
        spec = upcycled_spec(before.as_dict(), number, 2, 0, overrides, "the checkpoint")
        made = Described(Upcycled(weights, spec), _informed(weights, spec, surgery, None))
    elif surgery.kind == "widen":
        sections = widened_sections(before.as_dict(), surgery.numbers[0])
        spec = resolve_spec(sections, "after surgery the spec", overrides)
        info = _informed(weights, spec, surgery, noise)
        made = Widened(weights, info, surgery.numbers[0], noise)
    else:
        made, spec = _regroup(weights, before, surgery, overrides, noise)
    wrong = misfit(made, weight_arrays(spec.model, spec.moe), "the new spec's model")
    if wrong is not None:
        raise InputError(f"surgery: {wrong}")
    return made, spec


def _informed(source: Source, spec: JobSpec, surgery: Surgery, how: object) -> SourceInfo:
    what = f"{surgery.kind}={','.join(map(str, surgery.numbers))}"
    info = changed(source.info, (what, how, spec.hash))
    state = {"surgery": what, **tokenizer_of(source.info.state)}
    return replace(info, spec=spec.as_dict(), spec_hash=spec.hash, state=state)


class _Regrouped:
    """A source with other experts: number i of its new ones is ``experts[i]`` of the old ones."""

    def __init__(self, source: Source, info: SourceInfo, experts: list[int], noise: float) -> None:
        self.source, self.info, self.experts, self.noise = source, info, experts, noise
        self.arrays = {
            name: replace(array, shape=(array.shape[0], len(experts), *array.shape[2:]))
            if has_expert_dim(name)
            else array
            for name, array in source.arrays.items()
        }

    def read_box(self, name: str, box: Box) -> Values:
        """See :class:`ckpt.rewrite.Source`."""
        if not has_expert_dim(name):
            return self.source.read_box(name, box)
        wanted = self.experts[slice(*box[1])]
        if not wanted:
            return self.source.read_box(name, (box[0], (0, 0), *box[2:]))
        first, last = min(wanted), max(wanted) + 1
        if last - first <= 2 * len(wanted):  # one read, of few that are not wanted
            old = self.source.read_box(name, (box[0], (first, last), *box[2:]))
            values = old[:, [expert - first for expert in wanted]]
        else:
            rows = [self.source.read_box(name, (box[0], (e, e + 1), *box[2:])) for e in wanted]
            values = np.concatenate(rows, axis=1)
        if self.noise and in_decoder(name) == ROUTER:
            self._add_noise(name, values, box)
        return values

    def _add_noise(self, name: str, values_LED: Values, box: Box) -> None:
        """Each row has a generator of its own: the noise of a row does not depend on the boxes."""
        size = self.arrays[name].shape[2]
        for i, layer in enumerate(range(*box[0])):
            for j, expert in enumerate(range(*box[1])):
                old = self.experts[expert]
                if expert and self.experts[expert - 1] == old:
                    row_D = values_LED[i, j]
                    if box[2] != (0, size):
                        row_box = ((layer, layer + 1), (old, old + 1), (0, size))
                        row_D = self.source.read_box(name, row_box)[0, 0]
                    scale = self.noise * float(np.sqrt(np.mean(np.square(row_D, dtype=np.float64))))
                    drawn_D = np.random.default_rng([layer, expert]).standard_normal(size)
                    values_LED[i, j] += (scale * drawn_D[slice(*box[2])]).astype(values_LED.dtype)


def _regroup(
    source: Source, before: JobSpec, surgery: Surgery, overrides: Sequence[str], noise: float
) -> tuple[Source, JobSpec]:
    moe = before.moe
    if moe is None:
        raise InputError(f"surgery {surgery.kind} needs a model with experts: this one is dense")
    sections = before.as_dict()
    if surgery.kind == "drop":
        unknown = [e for e in surgery.numbers if e >= moe.num_experts]
        if unknown:
            raise InputError(
                f"surgery drop ({unknown[0]}) must be an expert's number, 0 to "
                f"{moe.num_experts - 1}"
            )
        experts = [e for e in range(moe.num_experts) if e not in surgery.numbers]
        sections["moe"] |= {"num_experts": len(experts)}
    else:
        copies = surgery.numbers[0]
        experts = [e for e in range(moe.num_experts) for _ in range(copies)]
        scaled = moe.score_func == "softmax" or moe.norm_topk_prob
        sections["moe"] |= {
            "num_experts": len(experts),
            "top_k": moe.top_k * copies,
            "topk_per_group": moe.topk_per_group * copies,
            "route_scale": moe.route_scale / (1 if scaled else copies),
        }
    stored = source.arrays.get(ROUTER)
    if noise and (stored is None or stored.logical_dtype not in ("float32", "float64")):
        raise InputError(f"--noise ({noise}) needs weights in float32")
    spec = resolve_spec(sections, "after surgery the spec", overrides)
    info = _informed(source, spec, surgery, (experts, noise))
    return _Regrouped(source, info, experts, noise), spec
