"""Loads of experts in few numbers: quantiles over all layers, and what the log has."""

import json

import numpy as np
import pytest

from pretrain.train.expert_loads import QUANTILES, load_quantiles, loads, logged_loads


def test_quantiles_are_loads_of_experts_over_their_own_layers_mean():
    small, large = [1] * 98 + [2, 0], [1000] * 99 + [3000]
    by_hand = sorted(count / (sum(row) / 100) for row in (small, large) for count in row)
    quantiles = load_quantiles(loads([small, large]))
    assert quantiles == {
        "p50": by_hand[99], "p90": by_hand[179], "p99": by_hand[197], "max": by_hand[199]
    }  # fmt: skip
    assert quantiles["max"] == pytest.approx(3000 / 1020)


def test_an_even_load_is_1_and_a_layer_without_tokens_is_left_out():
    assert load_quantiles(loads([[5, 5], [0, 0]])) == dict.fromkeys(QUANTILES, 1.0)
    assert load_quantiles(loads([])) == load_quantiles(loads([[0, 0]])) == {}
    assert loads([[0, 0], [3, 1]]).tolist() == [[0, 0], [1.5, 0.5]]


def test_the_log_has_the_loads_of_chosen_layers_in_percent():
    counts = np.full((60, 256), 100)
    counts[41, 7] = 500
    logged = logged_loads(loads(counts.tolist()), range(3, 63), 1)
    assert list(logged) == ["3", "12", "22", "32", "42", "44", "52", "62"]
    assert logged["44"][7] == 492
    assert logged["3"] == [100] * 256
    assert len(json.dumps(logged)) < 12_000
    few = logged_loads(loads([[1, 3], [2, 2]]), [0, 1], 1)
    assert few == {"0": [50, 150], "1": [100, 100]}
    assert logged_loads(loads([]), [], 1) == {}


@pytest.mark.parametrize(("experts", "layers"), [(8, 7), (256, 7), (400, 3), (4096, 3)])
def test_more_experts_mean_fewer_layers_in_the_log(experts, layers):
    loads_LE = np.ones((61, experts))
    logged = logged_loads(loads_LE, range(61), 1)
    assert len(logged) == layers
    assert {"0", "30", "60"} <= set(logged)


def test_the_log_grows_with_the_logarithm_of_the_steps():
    loads_LE = np.ones((1, 2))
    logged = [n for n in range(1, 100_001) if logged_loads(loads_LE, [0], n)]
    assert logged[:512] == list(range(1, 513))
    assert logged[512:515] == [514, 516, 518]
    # 256 of each doubling up to 65,536 = 512 · 2^7, and then one of 256.
    assert len(logged) == 512 + 7 * 256 + (100_000 - 65_536) // 256
    assert set(np.diff(logged).tolist()) == {2**n for n in range(9)}
