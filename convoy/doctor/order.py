"""Checks of the order of experts: whether they are those of their router's rows.

Legend: E experts, D d_model.

exp_avg_sq of a row of the router and of the gate and up of its expert are means over the same
tokens, and have the same profile over the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from convoy.doctor.check import Check, Finding
from convoy.doctor.names import GATE, MATRICES, SQUARE, UP
from convoy.doctor.patient import Layer, Patient
from convoy.doctor.vitals import Values

ORDER = Check(
    "expert-order",
    "experts are not those of their router's rows",
    "second moments of router and experts, or --against",
    ("torchtitan#1918",),
    "put the experts into the order of the router's rows",
)
CHECKS = (ORDER,)
_SHARE = 0.35  # of the agreement in another order, at most as stored


class Orders:
    """Whose inputs the rows of each router have, by layer and over all layers.

    exp_avg_sq of a row of the router and of the gate and up of its expert are means over the same
    tokens.
    """

    def __init__(self) -> None:
        self._scores: dict[int, Values] = {}

    def add(self, layer: Layer) -> None:
        """Compare every row with every expert."""
        rows, inputs = layer.rows.get(SQUARE), _inputs(layer)
        if rows is None or len(rows) < 3 or sorted(inputs) != list(range(len(rows))):
            return
        own = np.stack([inputs[e] for e in range(len(rows))])
        if own.shape == rows.shape and (rows > 0).all():
            self._scores[layer.number] = _scores(_apart(np.log(rows)), _apart(own))

    def find(self, patient: Patient) -> Iterator[Finding]:
        """One order in all layers, or orders of single layers."""
        layers = tuple(self._scores)
        if len(layers) > 1 and len({of.shape for of in self._scores.values()}) == 1:
            total = sum(self._scores.values()) / math.sqrt(len(layers))
            yield from _judged(patient, layers, np.asarray(total))
        for layer, scores in self._scores.items():
            yield from _judged(patient, (layer,), scores)


def _judged(patient: Patient, layers: tuple[int, ...], scores: Values) -> Iterator[Finding]:
    """Whether another order explains what the stored one does not at all.

    The best of all orders gains by chance: of E x E normal numbers the mean of the chosen ones was
    1.15 standard deviations for 8 experts, 2.18 for 64, and 2.68 for 256, always below
    sqrt(2 ln E) - 0.65.
    """
    order = best_assignment(scores)
    moved = {e: k for e, k in enumerate(order) if k != e}
    if len(moved) < 2:
        return
    count = len(scores)
    left = np.ones(scores.shape, bool)
    left[range(count), order] = False
    chance = (math.sqrt(2 * math.log(count)) - 0.65) * max(1.0, float(scores[left].std()))
    right = np.array([scores[e, e] for e in moved])
    wrong = np.array([scores[e, k] for e, k in moved.items()])
    most = 2 * len(moved) >= count and len(moved) >= 4
    least = chance + 5 / math.sqrt(len(moved)) if most else 2 * chance + 3
    if wrong.mean() < least or right.mean() > _SHARE * wrong.mean():
        return
    if not most and (wrong - right).min() < 3:
        return
    said = ", ".join(f"{e} is at {k}" for e, k in list(moved.items())[:4])
    more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
    evidence = (
        f"the expert of row {said}{more}: so second moments agree by {wrong.mean():.1f} standard "
        f"deviations on average, as stored by {right.mean():.1f}"
    )
    numbers = {"order": {str(e): k for e, k in moved.items()},
               "moved": float(wrong.mean()), "as_stored": float(right.mean())}  # fmt: skip
    yield Finding(ORDER, evidence, layers, tuple(sorted(moved)),
                  patient.arrays_of(layers, MATRICES), numbers)  # fmt: skip


def _inputs(layer: Layer) -> dict[int, Values]:
    gates, ups = layer.of(GATE, SQUARE), layer.of(UP, SQUARE)
    return {
        e: gates[e].log_ins + ups[e].log_ins
        for e in gates if e in ups and not any(v.dead or v.not_finite for v in (gates[e], ups[e]))
    }  # fmt: skip


def _apart(logs: Values) -> Values:
    """What is an expert's own: without its mean, and without what all experts have."""
    own = logs - logs.mean(1, keepdims=True)
    apart: Values = own - own.mean(0)
    return apart


def _scores(a: Values, b: Values) -> Values:
    """Correlations of all rows with all rows, in standard deviations (Fisher's z)."""
    scale = math.sqrt(max(1, a.shape[1] - 3))
    x, y = (v / np.maximum(np.sqrt((v * v).sum(1, keepdims=True)), 1e-300) for v in (a, b))
    scores: Values = np.arctanh(np.clip(x @ y.T, -0.999, 0.999)) * scale
    return scores


def best_assignment(scores: Values) -> list[int]:
    """The column of each row, no column twice, with the largest sum of [E, E] scores (Kuhn, 1955;
    by shortest augmenting paths, Jonker and Volgenant, 1987)."""
    cost, count = -scores, len(scores)
    u, v = np.zeros(count + 1), np.zeros(count + 1)
    row_of = np.zeros(count + 1, np.int64)  # of each column, rows and columns from 1
    for row in range(1, count + 1):
        row_of[0], column = row, 0
        least, used = np.full(count + 1, np.inf), np.zeros(count + 1, bool)
        back = np.zeros(count + 1, np.int64)
        while row_of[column]:
            used[column] = True
            current = row_of[column]
            reduced = cost[current - 1] - u[current] - v[1:]
            nearer = ~used[1:] & (reduced < least[1:])
            least[1:][nearer], back[1:][nearer] = reduced[nearer], column
            open_columns = np.flatnonzero(~used[1:]) + 1
            following = open_columns[least[open_columns].argmin()]
            step = least[following]
            u[row_of[used]] += step
            v[used] -= step
            least[~used] -= step
            column = int(following)
        while column:
            row_of[column] = row_of[back[column]]
            column = int(back[column])
    columns = np.empty(count, np.int64)
    columns[row_of[1:] - 1] = np.arange(count)
    return [int(column) for column in columns]
