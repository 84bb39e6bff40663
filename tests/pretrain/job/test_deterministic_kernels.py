"""Runs whose bits are promised use deterministic kernels on CUDA."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils import deterministic

from pretrain.job.rank_model import use_deterministic_kernels

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def as_before(monkeypatch):
    """What the process has afterwards is what it had."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(
        deterministic, "fill_uninitialized_memory", deterministic.fill_uninitialized_memory
    )
    yield
    torch.use_deterministic_algorithms(False)


def test_a_device_gets_deterministic_kernels_and_a_cpu_stays_as_it_is(as_before):
    use_deterministic_kernels(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert VARIABLE not in os.environ
    use_deterministic_kernels(torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[VARIABLE] == ":4096:8"
    assert not deterministic.fill_uninitialized_memory
