"""Blends of sources and the global order, against brute force."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.preparation import prepare_corpora
from corpus.config import DataConfig, whole_weights
from pretrain.data.blend import Blend, Phase, period_of
from pretrain.data.corpora import open_corpora
from pretrain.data.loader import Cursor, Loader
from pretrain.data.order import BlendedOrder, GlobalOrder, OrderInBlocks
from pretrain.errors import InputError
from tests.support.jobs import write_corpus

NAMES = ["a", "b", "c", "d"]
WEIGHTS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1)
PHASES = st.lists(st.tuples(st.integers(1, 60), WEIGHTS), min_size=1, max_size=4)


def blend_of(phases) -> Blend:
    start, found = 0, []
    for length, weights in phases:
        found.append(Phase.of(start, weights))
        start += length
    return Blend(tuple(found))


def by_hand(phases, stop: int) -> list[tuple[str, int]]:
    """The source of each sample, and the number of the sample in it: largest deficit first."""
    taken, given_in_all = [], dict.fromkeys(NAMES, 0)
    starts = np.cumsum([0, *(length for length, _ in phases)])
    given: dict[str, int] = {}
    for n in range(stop):
        number = max(i for i, start in enumerate(starts[:-1]) if start <= n)
        weights, k = phases[number][1], n - int(starts[number])
        if k == 0:
            given = dict.fromkeys(weights, 0)
        total = sum(weights.values())
        deficits = {
            name: Fraction(weight, total) * (k + 1) - given[name]
            for name, weight in sorted(weights.items())
        }
        chosen = max(deficits, key=lambda name: deficits[name])
        taken.append((chosen, given_in_all[chosen]))
        given[chosen] += 1
        given_in_all[chosen] += 1
    return taken


@settings(max_examples=150, deadline=None)
@given(PHASES, st.randoms())
def test_every_sample_has_the_source_of_the_largest_deficit(phases, random):
    blend, stop = blend_of(phases), 150
    expected = by_hand(phases, stop)
    asked = np.array(random.sample(range(stop), 90))  # in any order
    found: dict[int, tuple[str, int]] = {}
    for name, places, numbers in blend.draw(asked):
        for place, number in zip(places, numbers, strict=True):
            assert int(asked[place]) not in found
            found[int(asked[place])] = name, int(number)
    assert found == {n: expected[n] for n in asked.tolist()}
    for end in (0, 1, 37, stop):
        names = [name for name, _ in expected[:end]]
        assert blend.drawn(end) == {name: names.count(name) for name in blend.sources}


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 10**15))
def test_proportions_are_exact_and_never_drift(weights, periods):
    blend = Blend((Phase.of(0, weights),))
    whole = whole_weights("w", weights)
    blend = Blend((Phase.of(0, whole),))
    total = sum(whole.values())
    assert blend.drawn(periods * total) == {n: periods * w for n, w in sorted(whole.items())}
    for more in range(total):
        drawn = blend.drawn(periods * total + more)
        for name, weight in whole.items():
            ideal = Fraction(weight * (periods * total + more), total)
            assert abs(drawn[name] - ideal) < len(whole), "bounded, however long the run is"


def test_one_period_of_many_samples():
    weights = whole_weights("w", {"a": 0.7, "b": 0.2, "c": 0.0999, "d": 0.0001})
    assert weights == {"a": 7000, "b": 2000, "c": 999, "d": 1}
    sources, before = period_of(tuple(sorted(weights.items())))
    assert np.bincount(sources).tolist() == [7000, 2000, 999, 1]
    for number in range(4):
        assert np.array_equal(before[sources == number], np.arange((sources == number).sum()))


@settings(max_examples=60, deadline=None)
@given(PHASES, PHASES, st.integers(0, 200))
def test_a_changed_blend_leaves_earlier_samples_as_they_were(before, after, cursor):
    old, new = blend_of(before), blend_of(after)
    joined = old.continued(new, cursor)
    samples = np.arange(cursor)

    def drawn(blend, asked):
        rows = [
            (int(asked[p]), name, int(n))
            for name, places, numbers in blend.draw(asked)
            for p, n in zip(places, numbers, strict=True)
        ]
        return sorted(rows)

    assert drawn(joined, samples) == drawn(old, samples)
    # From the cursor on the spec's weights hold, and no document of a source is passed over.
    later = np.arange(cursor, cursor + 120)
    weights = [{p.from_sample: dict(p.weights) for p in b.phases} for b in (joined, new)]
    for n in later.tolist():
        now = [w[max(start for start in w if start <= n)] for w in weights]
        assert now[0] == now[1]
    rows = drawn(joined, np.concatenate([samples, later]))
    for name in joined.sources:
        assert [n for _, of, n in rows if of == name] == list(
            range(sum(of == name for _, of, _ in rows))
        )
    assert joined.continued(new, cursor) == joined, "a second start changes nothing"
    assert Blend.from_json(joined.as_json()) == joined


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 5), st.randoms())
def test_many_samples_at_once_are_those_one_by_one(count, seed, random):
    order = GlobalOrder(count, seed)
    indices = np.array([random.randrange(3 * count) for _ in range(50)])
    assert order.many(indices).tolist() == [order[i] for i in indices.tolist()]
    assert order.many(np.empty(0, np.int64)).tolist() == []


def test_an_order_of_many_sequences_needs_no_table_of_them():
    order = GlobalOrder(10**12, 3)
    indices = np.arange(5 * 10**11, 5 * 10**11 + 100)
    assert order.many(indices).tolist() == [order[i] for i in indices.tolist()]
    assert sum(table.nbytes for table in order._rounds.values()) < 1 << 26


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.lists(st.integers(1, 40), min_size=4, max_size=4), st.integers(0, 3))
def test_each_source_is_drawn_in_its_own_order(weights, sizes, seed):
    of = dict(zip(NAMES, sizes, strict=True))
    order = BlendedOrder(Blend((Phase.of(0, weights),)), of, seed)
    firsts = dict(zip(NAMES, np.cumsum([0, *sizes]), strict=False))
    expected = [
        firsts[name] + GlobalOrder(of[name], seed)[number]
        for name, number in by_hand([(1000, weights)], 120)
    ]
    assert order.many(np.arange(120)).tolist() == expected
    assert order[77] == expected[77]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 1.0, "b": 0.0}, r"the weight of b \(0.0\) must be above 0"),
        ({"a": -1.0}, r"the weight of a \(-1.0\) must be above 0"),
        ({"a": 1.0, "b": 1e-7}, r"must add up to at most 100000 as whole numbers"),
    ],
)
def test_weights_that_no_blend_has_are_one_line(weights, said):
    with pytest.raises(ValueError, match=said):
        whole_weights("data.sources", weights)


# ------------------------------------------------------------------------------------------------
# Prepared sources.


@pytest.fixture(scope="module")
def blended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blend")
    whole = write_corpus(folder / "all", 36)
    for number, path in enumerate(sorted(whole.iterdir())):
        part = folder / "text" / ("ab"[number % 2] if number < 30 else "v")
        part.mkdir(parents=True, exist_ok=True)
        path.rename(part / path.name)
    data = DataConfig.model_validate(
        {
            "sources": {
                name: {"source": str(folder / "text" / name), "path": str(folder / name),
                       "weight": weight}
                for name, weight in (("a", 3.0), ("b", 1.0))
            },
            "stages": [{"from_tokens": 3200, "weights": {"b": 1.0}}],
            "validation": {"v": {"source": str(folder / "text" / "v"), "path": str(folder / "v")}},
            "seq_len": 32,
            "shard_tokens": 5000,
        }
    )  # fmt: skip
    return data, prepare_corpora(data, 300, lambda _: None)


def test_sources_share_one_tokenizer_and_are_opened_again(blended):
    data, corpora = blended
    assert open_corpora(data, 300) == corpora
    prints = {one.manifest.tokenizer_fingerprint for one in (*corpora.sources, *corpora.validation)}
    assert len(prints) == 1
    (v,) = corpora.validation
    assert (v.manifest.train, v.manifest.train_documents) == ([], 0)
    assert set(corpora.held_out_sequences()) == {"a", "b", "v"}
    (line_a, line_b) = corpora.epochs_lines(100 + 60)
    assert line_a.startswith("the run draws 75 sequences of 32 tokens")
    assert line_b.startswith("the run draws 85 sequences")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("direction", [1, -1])
def test_the_loader_draws_the_blend_whatever_the_ranks(blended, ranks, direction):
    """In either order of the sources: in one of them their fingerprints rise."""
    _, corpora = blended
    corpora = replace(corpora, sources=corpora.sources[::direction])
    sequences, blend = corpora.train_sequences(), corpora.blend()
    order = corpora.order(blend, sequences, 7)
    assert [p.from_sample for p in blend.phases] == [0, 100]
    loaders = [Loader(sequences, order, lambda _: 16, 2, r, ranks) for r in range(ranks)]
    cursor, rows = Cursor(90), []
    for _ in range(2):
        steps = [loader.step(cursor) for loader in loaders]
        rows += sorted(tuple(row.tolist()) for batches, _ in steps for b in batches for row in b)
        cursor = steps[0][1]
    each = [list(one) for one in sequences.each]
    names = {one.manifest.fingerprint: i for i, one in enumerate(corpora.sources)}
    expected = []
    for first in (90, 106):
        step = []
        for name, places, numbers in blend.draw(np.arange(first, first + 16)):
            own = GlobalOrder(len(each[names[name]]), 7)
            step += [tuple(each[names[name]][own[int(n)]].tolist()) for n in numbers]
            assert len(places) == len(numbers)
        expected += sorted(step)
    assert rows == expected


def test_a_source_with_another_tokenizer_or_twice_the_same_is_refused(blended, tmp_path):
    data, _ = blended
    a, b = data.sources["a"], data.sources["b"]
    same = data.model_copy(update={
        "sources": {"a": a, "twin": a.model_copy(update={"path": str(tmp_path / "twin")})},
        "stages": [],
    })  # fmt: skip
    with pytest.raises(InputError, match=r"data.sources.twin .* must not have the documents of "):
        prepare_corpora(same, 300, lambda _: None)
    alone = data.alone().model_copy(update={"source": b.source, "path": str(tmp_path / "b")})
    prepare_corpora(alone, 300, lambda _: None)
    mixed = data.model_copy(update={
        "sources": {"a": a, "b": b.model_copy(update={"path": str(tmp_path / "b")})}, "stages": [],
    })  # fmt: skip
    with pytest.raises(InputError, match=r"was prepared with tokenizer None, the spec says .*/a/"):
        open_corpora(mixed, 300)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "x"}, "data.source and data.path must both be given, or tables"),
        ({"sources": {}}, "data.source and data.path must both be given, or tables"),
        (
            {"stages": [{"from_tokens": 5, "weights": {"c": 1.0}}]},
            r"\(c\) must name sources of",
        ),
        ({"stages": [{"from_tokens": 5, "weights": {}}]}, r"\(none\) must name sources of "),
        ({"stages": [{"from_tokens": 5, "weights": {"a": 1.0}}] * 2}, r"\(5\) must be above that "),
        ({"stages": [{"from_tokens": 5, "weights": {"a": 0.0}}]}, r"weight of a \(0.0\) must be"),
    ],
)
def test_a_blend_that_makes_no_sense_is_refused(blended, change, said):
    values = blended[0].model_dump()
    with pytest.raises(ValueError, match=said):
        DataConfig.model_validate({**values, **change})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 9000), st.lists(st.integers(0, 20_000), min_size=1))
def test_an_order_in_blocks_is_the_order(start, count, some):
    order = GlobalOrder(700, 3)
    blocks = OrderInBlocks(order)
    samples = range(start, start + count)
    assert blocks.many(samples).tolist() == order.many(np.array(samples)).tolist()
    chosen = sorted(set(some))
    assert blocks.many(chosen).tolist() == [order[i] for i in chosen]
