"""A real Prometheus scrapes a real run: it knows every name that rules and dashboard use, answers
every query of the dashboard, and fires the alert of a rank that hangs."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.build import FILE, dashboard
from tests.support.jobs import data_of, prepare_job, write_spec
from tests.support.prometheus import RULES, Prometheus, need, prometheus

ROOT = Path(__file__).parent.parent.parent
# What a run on two CPU ranks without a slow rank, and with dropless routing, has no samples of.
WITHOUT_SAMPLES = {
    "convoy_gpu_utilization_ratio", "convoy_gpu_memory_bytes", "convoy_straggler_speed_ratio",
    "convoy_moe_capacity_share", "convoy_restore_duration_seconds",
    "convoy_data_source_tokens_total", "convoy_gpu_energy_joules_total",
}  # fmt: skip
METRIC = re.compile(r"\bconvoy[_:][a-z0-9_:]+")


def queries() -> list[str]:
    panels = json.loads(FILE.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def base(name: str) -> str:
    """The name of the family that Prometheus keeps the type of a sample under."""
    return re.sub(r"_(bucket|sum|count|total)$", "", name)


def test_the_dashboard_is_what_the_script_writes():
    text = json.dumps(dashboard(), indent=1) + "\n"
    assert FILE.read_text() == text, "python -m deploy.grafana.build"


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    panels = json.loads(FILE.read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


@contextlib.contextmanager
def torchrun(spec: Path, ranks: int) -> Iterator[None]:
    """A run in processes that are ended with the context, its output beside the spec."""
    words = ["--standalone", f"--nproc-per-node={ranks}", str(ROOT / "tools" / "pretrain.py")]
    with (spec.parent / "run.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, str(spec)],
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        # Ranks of torchrun are in sessions of their own, and end when torchrun is told to.
        process.send_signal(signal.SIGTERM)
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Prometheus]:
    """A server with a run of which rank 1 hangs in step 200, long before the run's end."""
    need("prometheus")
    folder = tmp_path_factory.mktemp("live")
    prepare_job(folder)
    spec = write_spec(
        folder, data=data_of(folder), metrics={
            "port": 0, "all_ranks": True, "dollars_per_rank_hour": 2.0,
        },
        train={"steps": 1000, "log_interval_steps": 5, "timeout_seconds": 200.0},
        eval={"sequences": 2, "interval_steps": 25}, checkpoint={"interval_steps": 40},
        detection={"stuck_seconds": 5.0},
        inject=[{"kind": "hang", "step": 200, "rank": 1}],
    )  # fmt: skip
    with torchrun(spec, 2), prometheus(folder, folder / "run" / "metrics") as server:
        server.until(lambda: len(server.query("convoy_rank_info")) == 2, "two ranks")
        server.until(lambda: server.query("convoy_step == 199"), "the step before the hang")
        yield server


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_exports_every_name_of_the_rules_and_the_dashboard(server):
    known = set(server.get("metadata"))
    records = set(re.findall(r"record: (\S+)", RULES.read_text()))
    used = {name for text in (RULES.read_text(), *queries()) for name in METRIC.findall(text)}
    missing = {name for name in used - records if not {name, base(name)} & known}
    assert missing == set()
    assert records - {"convoy:step_share:6h", "convoy:dropped_per_token:15m"} <= used


@pytest.mark.slow
@pytest.mark.engine
def test_prometheus_answers_every_query_of_the_dashboard(server):
    empty = set()

    def unanswered() -> set[str]:
        nonlocal empty
        found: dict[str, list[Any]] = {
            query: server.query(query.replace("$run", ".*")) for query in queries()
        }
        empty = {
            query for query, result in found.items()
            if not result and not set(METRIC.findall(query)) & WITHOUT_SAMPLES
        }  # fmt: skip
        return empty

    # Rates need two samples; means of saves need a save between them.
    with contextlib.suppress(AssertionError):
        server.until(lambda: not unanswered(), "every query has an answer", 30)
    assert empty == set()
    labels = {one["metric"]["run"] for one in server.query("convoy_step")}
    assert labels == {"tiny"}
    ranks = {one["metric"]["rank"] for one in server.query("convoy_rank_compute_seconds")}
    assert ranks == {"0", "1"}, "a rank's label is not that of the process that says so"


@pytest.mark.slow
@pytest.mark.engine
def test_a_rank_that_hangs_fires_its_alert_and_no_other(server):
    server.until(server.firing, "an alert fires", 120)
    assert server.firing() == {"ConvoyRankStuck"}
    (alert,) = (a for a in server.get("alerts")["alerts"] if a["state"] == "firing")
    assert alert["annotations"]["summary"] == "tiny: 1 ranks are stuck"
    assert alert["annotations"]["runbook_url"] == "docs/operations.md#convoyrankstuck"
    assert server.value("convoy_step") == 199
