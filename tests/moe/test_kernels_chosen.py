"""Where kernels run, and what torch sees of them, with and without Triton."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe.kernels
import router.kernels
from moe.rows import row_map, sum_rows, take_rows
from parallel.exact.unit_sums import UnitSums
from router.kernels import operators
from tests.moe.test_layer import D, make_layer
from tests.support.kernels import load_operators


@pytest.fixture
def _cuda(monkeypatch):
    """A machine that has an H100 and Triton."""
    monkeypatch.setattr(operators, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    operators._has_triton.cache_clear()
    yield
    operators._has_triton.cache_clear()


@pytest.mark.usefixtures("_cuda")
def test_kernels_run_on_cuda_alone():
    for package in (router.kernels, moe.kernels):
        assert package.available("cuda")
        assert not package.available("cpu")
        assert not package.available("meta")


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("lacks", ["triton", "cuda", "capability", "nvidia"])
def test_kernels_need_triton_and_a_device_they_are_compiled_for(lacks, monkeypatch):
    if lacks == "triton":
        monkeypatch.setattr(operators, "find_spec", lambda name: None)
    elif lacks == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif lacks == "capability":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    else:
        monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not moe.kernels.available("cuda")


def test_who_replaces_the_routers_answer_replaces_the_layers(monkeypatch):
    monkeypatch.setattr(router.kernels, "available", lambda device_type: device_type == "cpu")
    assert moe.kernels.available("cpu")


def test_no_import_and_no_step_on_a_cpu_loads_triton():
    code = (
        "import sys, torch, moe, moe.kernels, router.kernels\n"
        "from tests.support.kernels import load_operators\n"
        "load_operators()\n"
        "layer = moe.MoELayer(moe.MoEConfig(d_model=8, d_ff=8, num_experts=4, top_k=2))\n"
        "layer(torch.randn(3, 8)).hidden.sum().backward()\n"
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_layers_table_of_launches_is_the_routers():
    names = set(load_operators())
    assert moe.kernels.LAUNCHES is router.kernels.LAUNCHES
    assert set(moe.kernels.LAUNCHES) == names
    assert all(hasattr(torch.ops.convoy, name.removeprefix("convoy::")) for name in names)


def test_fake_tensors_go_through_each_operator():
    load_operators()
    with FakeTensorMode():
        x = torch.empty(12, 40, dtype=torch.bfloat16, device="cuda")
        source = torch.empty(30, dtype=torch.int64, device="cuda")
        real = torch.empty((), dtype=torch.int32, device="cuda")
        logits = torch.empty(12, 6, device="cuda")
        weight = torch.empty(30, 1, dtype=torch.bfloat16, device="cuda")
        ops, flags = torch.ops.convoy, (2, False, False, True, 1.0)
        order, counts = ops.sort_by_bin(source, 12)
        many, counts_of_many = ops.sort_by_many_bins(source, 5000)
        both = ops.sort_assignments(source.view(10, 3), 2, 4, 5, True)
        y = ops.take_rows(x, source, real)
        chosen = ops.select_experts(logits, None, *flags)
        dgate, dup, dweights, h = ops.activate_backward(y, y, y, weight, real, "swiglu")
        loads = torch.empty(6, dtype=torch.int64, device="cuda")
        balance = ops.balance(chosen[0], chosen[2], chosen[6], chosen[5], loads, 0.1, 0.1)
        dprobs, dlogs = ops.balance_backward(chosen[2], loads, None, None, real, 0.1, 0.1)
        assert [(t.shape, t.device.type) for t in balance] == [((), "cuda")] * 7
        results = {
            "gradient of probabilities": (dprobs, (6,)), "of logarithms": (dlogs, (12,)),
            "sort": (order, (30,)), "counts": (counts, (13,)), "many": (many, (30,)),
            "places": (both[0], (30,)), "sources": (both[1], (30,)), "by row": (both[2], (30,)),
            "ends of rows": (both[3], (11,)), "counts of bins": (both[4], (7,)),
            "ends of bins": (both[5], (6,)),
            "counts of many": (counts_of_many, (5001,)), "take": (y, (30, 40)),
            "sum": (ops.sum_rows(y, order, counts, None), (12, 40)),
            "h": (ops.activate(None, y, weight, real, "relu2"), (30, 40)),
            "dgate": (dgate, (30, 40)), "dup": (dup, (30, 40)), "dweights": (dweights, (30, 1)),
            "h again": (h, (30, 40)), "probabilities": (chosen[0], (12, 6)),
            "weights": (chosen[1], (12, 2)), "indices": (chosen[3], (12, 2)),
            "flags": (chosen[5], (12,)), "packed": (ops.pack_rows(x), (12, 41)),
            "dlogits": (ops.select_experts_backward(logits, chosen[3], None, chosen[1], None,
                                                    *flags), (12, 6)),
        }  # fmt: skip
        for name, (result, shape) in results.items():
            assert (tuple(result.shape), result.device.type) == (shape, "cuda"), name
        assert {t.dtype for t in (y, dgate, dup, dweights, h)} == {torch.bfloat16}
        assert [t.dtype for t in both] == [torch.int64] * 5 + [torch.int32]
        assert [t.dtype for t in chosen[3:6]] == [torch.int64, torch.int64, torch.bool]


@pytest.mark.parametrize("current", [0, 1])
def test_kernels_are_launched_on_the_device_of_their_tensors(current, monkeypatch):
    entered = []

    @contextmanager
    def on(device):
        entered.append(device.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", on)
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    assert operators.on_its_device(lambda none, x: x.shape, None, x) == (2,)
    assert entered == ([] if current == 1 else [1])


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_that_the_kernel_does_not_know_are_left_to_plain_operations(score_func, monkeypatch):
    monkeypatch.setattr(router.kernels, "available", lambda device_type: device_type == "cpu")
    layer = make_layer(score_func=score_func)
    assert layer.router._has_kernel(torch.randn(3, 6)) == (score_func != "sqrtsoftplus")


def test_exact_sums_keep_the_router_to_plain_operations():
    layer = make_layer()
    assert not layer.router.exact
    layer.use_exact_sums(UnitSums.__new__(UnitSums))
    assert layer.router.exact


@pytest.mark.parametrize("shape", [(5,), (5, 2, 3)])
def test_rows_of_any_shape_end_at_the_real_ones(shape):
    x, source = torch.randn(shape), torch.tensor([4, 0, 4, 1])
    index = row_map(source, 5)
    taken = take_rows(x, index, torch.tensor(3))
    assert torch.equal(taken[:3], x[source[:3]])
    assert not taken[3:].any()
    y = torch.randn(4, D)
    y[3] = torch.nan
    total = sum_rows(y, index, torch.tensor(3))
    assert torch.equal(total, torch.zeros(5, D).index_add_(0, source[:3], y[:3]))
