"""Changes of a model's experts and their width by name: weights and spec together, never by
accident.

Legend: L layers, E experts, D d_model, F d_ff, K top_k.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ckpt.rewrite import Selected, Source, SourceArray, SourceInfo, changed
from parallel import Topology
from parallel.layout import Box
from pretrain.convert.widen import Widened, widened_sections
from pretrain.errors import InputError
from pretrain.model import first_matrix, meta_decoder
from pretrain.spec import JobSpec, resolve_spec, upgraded
from pretrain.state import model_arrays, parameter_layouts

Values = np.ndarray[Any, Any]

_OF_EXPERTS = re.compile(r"model/layers/moe/(experts/\w+|router/(weight|expert_bias))")
_EXPERT_MATRIX = re.compile(r"model/layers/moe/experts/(w_gate|w_up|w_down)")
_KINDS = ("upcycle=NUM_EXPERTS", "drop=EXPERT,...", "duplicate=COPIES", "widen=COPIES")


class Surgery(NamedTuple):
    """What is to be done: ``kind`` is upcycle, drop, duplicate or widen."""

    kind: str
    numbers: tuple[int, ...]


def parse_surgery(text: str) -> Surgery:
    """Read ``"drop=3,7"``. Raises InputError for what is none of the four."""
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
    """The weights and the spec of a model whose experts are others; moments are left behind.

    ``drop`` leaves experts out. A token whose top_k experts were among them takes its next best
    ones, and the weights are theirs: with ``norm_topk_prob`` they sum to one again.

    ``duplicate`` puts the copies of an expert side by side, its router's row among them, so that
    they stay in its group. A token that chose an expert chooses all its copies: top_k and
    topk_per_group are multiplied by their number, and each copy has an equal part of the weight,
    so that the output is what it was. (Softmax scores are divided by the copies, and weights that
    are renormalized, or a softmax of the chosen, too. Sigmoid scores that are not renormalized are
    not, and route_scale is divided instead.) Copies that are alike get gradients that are alike:
    with ``noise`` above 0 the copies' rows of the router, all but the first, differ by normal
    numbers of so many times the row's root mean square. To keep a step's work, override
    ``moe.top_k`` with what it was; the copies then take turns only as the noise lets them.

    ``upcycle`` makes a MoE of a dense model (Komatsuzaki et al., arXiv 2212.05055): every expert is
    a copy of the layer's feed-forward, the router is fresh, top_k is 2 unless it is overridden.

    ``widen`` multiplies d_ff, of the experts or of a dense model's layers: every hidden unit is
    there several times and the output stays what it was, with ``noise`` too; see
    :class:`pretrain.widen.Widened`.

    Args:
        source: with the spec that it was trained with.
        surgery: what is done.
        overrides: ``section.field=value`` of the new spec.
        noise: see above.

    Raises InputError for experts that there are not, and for a spec that does not fit.
    """
    if not source.info.spec.get("model"):
        raise InputError("surgery needs a checkpoint that holds the spec of its model")
    weights = Selected(source, {n: n for n in source.arrays if n.startswith("model/")})
    before = resolve_spec(upgraded(source.info.spec), "the checkpoint's spec")
    if noise < 0 or (noise and surgery.kind not in ("duplicate", "widen")):
        raise InputError(f"--noise ({noise}) must be 0 but with duplicate and widen, and not below")
    operation = {"upcycle": _upcycle, "widen": _widen}.get(surgery.kind, _regroup)
    made, spec = operation(weights, before, surgery, overrides, noise)
    _check_fits(made, spec)
    return made, spec


def _informed(source: Source, spec: JobSpec, surgery: Surgery, how: object) -> SourceInfo:
    what = f"{surgery.kind}={','.join(map(str, surgery.numbers))}"
    info = changed(source.info, (what, how, spec.hash))
    return replace(info, spec=spec.as_dict(), spec_hash=spec.hash, state={"surgery": what})


def _check_fits(source: Source, spec: JobSpec) -> None:
    """The arrays are those of the new spec's model: nothing was left as it was by accident."""
    decoder = meta_decoder(spec.model, spec.moe)
    layouts = parameter_layouts(decoder, Topology())
    wanted = {a.spec.name: a.spec.shape for a in model_arrays(decoder, decoder, layouts, 0)}
    found = {name: array.shape for name, array in source.arrays.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise InputError(
                f"surgery: {name} has shape {found.get(name)} but the new spec's model needs "
                f"{wanted.get(name)}"
            )


class _Regrouped:
    """A source with other experts: number i of its new ones is ``experts[i]`` of the old ones."""

    def __init__(self, source: Source, info: SourceInfo, experts: list[int], noise: float) -> None:
        self.source, self.info, self.experts, self.noise = source, info, experts, noise
        self.arrays = {
            name: replace(array, shape=(array.shape[0], len(experts), *array.shape[2:]))
            if _OF_EXPERTS.fullmatch(name)
            else array
            for name, array in source.arrays.items()
        }

    def read_box(self, name: str, box: Box) -> Values:
        """See :class:`ckpt.source.Source`."""
        if not _OF_EXPERTS.fullmatch(name):
            return self.source.read_box(name, box)
        wanted = self.experts[slice(*box[1])]
        if not wanted:
            return self.source.read_box(name, (box[0], (0, 0), *box[2:]))
        first, last = min(wanted), max(wanted) + 1
        if last - first <= 2 * len(wanted):  # one read, of few that are not wanted
            old = self.source.read_box(name, (box[0], (first, last), *box[2:]))
            values = old[:, [expert - first for expert in wanted]]
        else:
            each = [self.source.read_box(name, (box[0], (e, e + 1), *box[2:])) for e in wanted]
            values = np.concatenate(each, axis=1)
        if self.noise and name.endswith("router/weight"):
            self._add_noise(values, box)
        return values

    def _add_noise(self, values_LED: Values, box: Box) -> None:
        """The same for a row however it is read: a generator for each, from its first number on."""
        name = "model/layers/moe/router/weight"
        size = self.arrays[name].shape[2]
        for i, layer in enumerate(range(*box[0])):
            for j, expert in enumerate(range(*box[1])):
                old = self.experts[expert]
                if expert and self.experts[expert - 1] == old:
                    row_D = values_LED[i, j]
                    if box[2] != (0, size):
                        whole = ((layer, layer + 1), (old, old + 1), (0, size))
                        row_D = self.source.read_box(name, whole)[0, 0]
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
    stored = source.arrays.get("model/layers/moe/router/weight")
    if noise and (stored is None or stored.logical_dtype not in ("float32", "float64")):
        raise InputError(f"--noise ({noise}) needs weights in float32")
    spec = resolve_spec(sections, "after surgery the spec", overrides)
    info = _informed(source, spec, surgery, (experts, noise))
    return _Regrouped(source, info, experts, noise), spec


class _Upcycled:
    """A dense source as a MoE: see :func:`operate`."""

    def __init__(self, dense: Source, info: SourceInfo, spec: JobSpec) -> None:
        assert spec.moe is not None
        self.dense, self.info, self.moe = dense, info, spec.moe
        self.num_layers, self.seed = spec.model.num_layers, spec.train.seed
        decoder = meta_decoder(spec.model, spec.moe)
        layouts = parameter_layouts(decoder, Topology())
        self.arrays: dict[str, SourceArray] = {}
        for array in model_arrays(decoder, decoder, layouts, 0):
            old = dense.arrays.get(_old_name(array.spec.name))
            dtype = array.spec.logical_dtype if old is None else old.logical_dtype
            self.arrays[array.spec.name] = SourceArray(
                array.spec.shape, dtype, array.spec.splits, array.spec.attributes
            )

    def read_box(self, name: str, box: Box) -> Values:
        """See :class:`ckpt.source.Source`."""
        array = self.arrays[name]
        if "layers" not in array.attributes:
            return self.dense.read_box(name, box)
        layers = array.attributes["layers"][slice(*box[0])]
        if name.startswith("model/layers/moe/router/"):
            return self._router(name, layers, box)
        old = _old_name(name)
        there = self.dense.arrays[old].attributes["layers"]
        at = [there.index(layer) for layer in layers]
        if not at:
            return np.empty([stop - start for start, stop in box], array.dtype)
        assert at == list(range(at[0], at[-1] + 1)), "layers that stay are the first ones"
        rows = (at[0], at[-1] + 1)
        if old == name:
            return self.dense.read_box(name, (rows, *box[1:]))
        values = self.dense.read_box(old, (rows, box[3], box[2])).transpose(0, 2, 1)
        return np.repeat(values[:, None], box[1][1] - box[1][0], axis=1)

    def _router(self, name: str, layers: list[int], box: Box) -> Values:
        out = np.zeros([stop - start for start, stop in box], np.float32)
        if name.endswith("/weight"):
            shape = (self.moe.num_experts, self.moe.d_model)
            rest = tuple(slice(*extent) for extent in box[1:])
            for i, layer in enumerate(layers):
                parameter = f"layers.{layer}.moe.router.weight"
                out[i] = first_matrix(
                    parameter, shape, self.moe.d_model, self.num_layers, self.seed
                ).numpy()[rest]
        return out


def _old_name(name: str) -> str:
    match = _EXPERT_MATRIX.fullmatch(name)
    return name if match is None else f"model/layers/ffn/{match[1]}/weight"


def _upcycle(
    source: Source, before: JobSpec, surgery: Surgery, overrides: Sequence[str], noise: float
) -> tuple[Source, JobSpec]:
    spec = upcycled_spec(before.as_dict(), surgery.numbers[0], 2, 0, overrides, "the checkpoint")
    return _Upcycled(source, _informed(source, spec, surgery, None), spec), spec


def _widen(
    source: Source, before: JobSpec, surgery: Surgery, overrides: Sequence[str], noise: float
) -> tuple[Source, JobSpec]:
    copies = surgery.numbers[0]
    sections = widened_sections(before.as_dict(), copies)
    spec = resolve_spec(sections, "after surgery the spec", overrides)
    return Widened(source, _informed(source, spec, surgery, noise), copies, noise), spec


def upcycled_spec(
    sections: dict[str, Any],
    num_experts: int,
    top_k: int,
    first_k_dense: int,
    overrides: Sequence[str],
    where: str,
) -> JobSpec:
    """The spec of a MoE whose experts are copies of a dense model's layers.

    Raises InputError where the model is not dense, or experts would have other sizes.
    """
    if sections["moe"] is not None:
        raise InputError(f"{where} must be a dense model: it has a [moe] section")
    d_ff = sections["model"]["d_ff"]
    sections = {**sections, "moe": {"num_experts": num_experts, "top_k": top_k, "d_ff": d_ff}}
    sections["model"] = {
        **sections["model"], "first_k_dense": first_k_dense, "d_ff": d_ff if first_k_dense else 0,
    }  # fmt: skip
    spec = resolve_spec(sections, where, overrides)
    assert spec.moe is not None
    for field, value, rule in (
        ("d_ff", spec.moe.d_ff, d_ff),
        ("num_shared_experts", spec.moe.num_shared_experts, 0),
    ):
        if value != rule:
            raise InputError(f"moe.{field} ({value}) must be {rule}: experts are copies of a layer")
    return spec
