"""Each machine of a campaign has a CUDA device of its own: NCCL refuses two ranks on one."""

from __future__ import annotations

import subprocess

import pytest
import torch

from convoy.chaos import Machines


class Process:
    """Runs until it is ended."""

    code = None

    def __init__(self, *_, env, **__):
        self.device = env.get("CUDA_VISIBLE_DEVICES")

    def poll(self):
        return self.code


@pytest.mark.parametrize(
    ("seen", "devices"),
    [(None, ["0", "1"]), ("4,7", ["4", "7"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])],
)
def test_a_machine_that_comes_takes_the_device_of_the_one_that_was_lost(
    seen, devices, monkeypatch, tmp_path
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", Process)
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    launch = Machines(["program.py"], tmp_path, least=1, most=2)
    numbers = [launch.start(), launch.start()]
    assert [launch.processes[n].device for n in numbers] == devices
    launch.processes.pop(numbers[0])
    assert launch.processes[launch.start()].device == devices[0]
    launch.processes[numbers[1]].code = 0  # its torchrun has ended
    assert launch.processes[launch.start()].device == devices[1]
