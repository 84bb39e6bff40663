"""The learning studies: their specs, their tables and their pictures."""

from __future__ import annotations

import pytest

from bench.learning.__main__ import differences, rows_of
from bench.learning.curves import Curve
from bench.learning.runs import spec_of
from bench.learning.studies import STUDIES
from pretrain.spec import resolve_spec


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_a_study_has_a_spec(name):
    study = STUDIES[name]
    hashes = []
    for case in study.cases:
        for subject in study.subjects:
            for seed in study.seeds:
                recipe, settings = spec_of(study, case, subject, seed)
                spec = resolve_spec(recipe, name, settings)
                hashes.append((spec.hash, subject.starts))
                assert spec.train.seed == seed
                assert (spec.moe is None) == ("moe" in subject.without)
    assert len(set(hashes)) == len(hashes), "subjects, cases and seeds are different runs"


def test_moe_and_dense_have_equal_active_flops():
    """But for the router."""
    study = STUDIES["moe-dense"]
    for case in study.cases:
        moe, dense = (
            resolve_spec(*_words(spec_of(study, case, subject, 0))) for subject in study.subjects
        )
        assert moe.moe is not None
        assert moe.moe.top_k * moe.moe.d_ff == moe.model.d_ff == dense.model.d_ff
        assert moe.model == dense.model
        assert moe.train.steps == dense.train.steps


def _words(found):
    recipe, settings = found
    return recipe, "a study", settings


def curve(subject: str, seed: int, bits: float, losses: list[float]) -> Curve:
    tokens = [8 * (i + 1) for i in range(len(losses))]
    return Curve("case", subject, seed, tokens, losses, [], [], bits, 1.5)


def test_a_table_has_the_mean_over_seeds_and_each_seed():
    curves = [curve("a", 0, 2.0, [3.0]), curve("a", 1, 2.2, [3.0]), curve("b", 0, 1.4, [3.0])]
    rows = {(row.subject, row.metric): row for row in rows_of(curves)}
    assert rows["a", "bits_per_byte"].value == pytest.approx(2.1)
    assert rows["a", "bits_per_byte"].samples == [2.0, 2.2]
    assert rows["a", "bits_per_byte"].ratio_to_limit == pytest.approx(1.4 / 2.1)
    assert rows["b", "bits_per_byte"].ratio_to_limit == 1


def test_the_largest_difference_of_a_loss_counts():
    first, other = curve("a", 0, 2.0, [4.0, 2.0]), curve("b", 0, 2.0, [4.0, 2.1])
    (row,) = differences([first, other])
    assert (row.subject, row.metric) == ("b", "loss_difference")
    assert row.value == pytest.approx(0.05)


def test_a_picture_has_a_panel_for_each_case_and_a_line_for_each_subject():
    pytest.importorskip("matplotlib")
    from bench.learning.plots import draw

    text = draw(
        "Title", [curve("first subject", 0, 2.0, [3.0, 2.0]), curve("second", 0, 2.0, [3.0, 1.0])]
    )
    assert text.startswith("<svg")
    for word in ("Title", "case", "first subject", "second", "loss, nats per token"):
        assert word in text
