"""The first hour on GPUs: its report, and all its parts on the pretended device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_parts import Part, parts_of
from tests.support.fake_gpu.build import why_not

ROOT = Path(__file__).parents[2]
IN_EVERY_PROCESS = ROOT / "tests" / "support" / "fake_gpu" / "in_every_process"


def part(name: str, program: str, seconds: float = 60) -> Part:
    return Part(name, [sys.executable, "-c", program], seconds, f"{name} shows", f"{name} means")


COUNTS = "import pathlib; f = pathlib.Path({!r}); f.write_text(f.read_text() + '.')"


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")


@pytest.mark.usefixtures("one_device")
def test_a_part_that_fails_is_in_the_report_with_its_meaning(monkeypatch, tmp_path, capsys):
    rows = {"rows": [{"case": "c", "subject": "convoy", "metric": "seconds", "value": 0.25,
                      "unit": "s", "ratio_to_limit": 0.5}]}  # fmt: skip
    good = f"open({str(tmp_path / 'good.json')!r}, 'w').write({json.dumps(rows)!r})"
    parts = [
        part("bad", "print('what it said'); raise SystemExit(3)"),
        part("good", good),
        part("elsewhere", "print('not on this device'); raise SystemExit(77)"),
        part("long", "import time; time.sleep(100)", seconds=0.5),
    ]
    monkeypatch.setattr(gpu, "parts_of", lambda *_, **__: parts)
    monkeypatch.setattr(gpu, "_LEAST_SECONDS", 0.1)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    report = (tmp_path / "report.md").read_text()
    assert "| bad | failed with 3 |" in report
    assert "| good | passed |" in report
    assert "| long | ran out of time |" in report
    assert "What this means: bad means" in report
    assert "what it said" in report
    assert "good means" not in report
    assert "elsewhere is left out: not on this device" in report
    assert "| c | convoy | seconds | 0.25 s | 0.500 |" in report
    assert json.loads((tmp_path / "machine.json").read_text())["device"] == "a device"
    assert "failed with 3" in capsys.readouterr().out


@pytest.mark.usefixtures("one_device")
def test_what_passed_is_not_run_again(monkeypatch, tmp_path):
    counts = {name: tmp_path / name for name in ("passes", "fails")}
    for file in counts.values():
        file.write_text("")
    parts = [
        part("passes", COUNTS.format(str(counts["passes"]))),
        part("fails", COUNTS.format(str(counts["fails"])) + "; raise SystemExit(1)"),
    ]
    monkeypatch.setattr(gpu, "parts_of", lambda *_, **__: parts)

    def ran(*more: str) -> tuple[str, str]:
        assert gpu.main(["--out", str(tmp_path / "out"), *more]) == 1
        return counts["passes"].read_text(), counts["fails"].read_text()

    assert ran() == (".", ".")
    assert ran() == (".", "..")
    assert ran("--again") == ("..", "...")
    monkeypatch.setattr(gpu, "commit", lambda: "another")
    assert ran() == ("...", "....")


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("gpus", ["2", "-1"])
def test_devices_that_are_not_there_are_refused(gpus, tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path), "--gpus", gpus]) == 2
    assert f"--gpus ({gpus}) must be 1 to the CUDA devices here (1)" in capsys.readouterr().err


def test_without_time_nothing_is_run(tmp_path):
    found = gpu.run_all([part("one", "")], tmp_path, {}, seconds=5, again=False)
    assert found["one"].outcome == "not run"
    assert "run the same command again" in (tmp_path / "report.md").read_text()


def test_parts_on_several_devices_come_after_a_run_on_one(tmp_path):
    names = [each.name for each in parts_of(tmp_path, 8, quick=False)]
    assert names[:4] == ["tests", "train", "fsdp", "ep"]
    assert names[-1] == "chaos"
    assert len(parts_of(tmp_path, 1, quick=False)) < len(names)
    assert "--gpus 4" in " ".join(parts_of(tmp_path, 6, quick=False)[2].command)


def test_the_page_has_every_part(tmp_path):
    page = (ROOT / "docs" / "gpu.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert named == [each.name for each in parts_of(tmp_path, 8, quick=False)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_all_parts_run_on_the_pretended_device(tmp_path):
    path = os.pathsep.join([str(IN_EVERY_PROCESS), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path), "--gpus", "2", "--quick",
         "--seconds", "1100"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "CONVOY_TEST_DEVICE": "cuda"},
        capture_output=True, text=True,
    )  # fmt: skip
    report = (tmp_path / "report.md").read_text() if done.returncode != 2 else ""
    assert done.returncode == 0, done.stderr + report
    parts = json.loads((tmp_path / "machine.json").read_text())["parts"]
    left_out = {name for name, each in parts.items() if each["outcome"] != "passed"}
    assert left_out == {"float8"}  # of float8 a CPU has no kernel
    assert len(parts) == len(parts_of(tmp_path, 2, quick=True))
