"""The rules for Prometheus: promtool accepts them; each alert fires when it should, only then."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from parallel import Topology
from pretrain.observe import Metrics, RankMetrics
from tests.support.jobs import make_spec
from tests.support.prometheus import RULES, need
from tests.test_docs import anchors

ROOT = Path(__file__).parent.parent.parent
RUN = 'run="a",instance="i",job="convoy",process_rank="0"'
START = f"convoy_start_timestamp_seconds{{{RUN}}}"
STEP = f"convoy_last_step_timestamp_seconds{{{RUN}}}"
SAVED = f'convoy_last_checkpoint_timestamp_seconds{{{RUN},tier="shared"}}'

# Of each alert: series in which it fires after a time, and series in which it does not. A series is
# its values, one a minute: "0+2x10" is 0, 2, ... 20. Time begins at 0.
FIRES = {
    "ConvoyRunDown": ("6m", {f"up{{{RUN}}}": "1 0x20"}),
    "ConvoyRankStuck": ("1m", {f"convoy_stuck_ranks{{{RUN}}}": "0 2x5"}),
    "ConvoyNoStep": ("30m", {START: "60x40", STEP: "600x40"}),
    "ConvoyNoCheckpoint": ("3h", {START: "60x200", SAVED: "120x200"}),
    "ConvoyRestartLoop": (
        "40m", {f'convoy_restarts_total{{{RUN},cause="lost_rank"}}': "0x5 1x5 2x5 3x30"},
    ),
    "ConvoyDiverges": (
        "10m", {f'convoy_health_actions_total{{{RUN},action="go_back+lower_lr"}}': "0x5 1x10"},
    ),
    "ConvoyCorruption": ("10m", {f'convoy_corruptions_total{{{RUN},kind="gradients"}}': "0x5 1x9"}),
    "ConvoyCheckpointFails": (
        "30m", {f'convoy_checkpoint_failures_total{{{RUN},tier="shared"}}': "0x5 1x5 2x5 4x20"},
    ),
    "ConvoyCommunicationHigh": ("16m", {f"convoy_communication_time_ratio{{{RUN}}}": "0.4x30"}),
    "ConvoyDataWaitHigh": ("25m", {
        f"convoy_data_wait_seconds_total{{{RUN}}}": "0+6x30",
        f"convoy_step_duration_seconds_sum{{{RUN}}}": "0+60x30",
    }),
    "ConvoyGpuIdle": ("16m", {f'convoy_gpu_utilization_ratio{{{RUN},rank="3"}}': "0.5x30"}),
    "ConvoyStraggler": ("11m", {f'convoy_straggler_speed_ratio{{{RUN},rank="3"}}': "0.5x30"}),
    "ConvoyDeadExperts": ("31m", {f'convoy_moe_dead_experts{{{RUN},layer="2"}}': "1x40"}),
    "ConvoyTokensDropped": ("35m", {
        f'convoy_moe_dropped_tokens_total{{{RUN},layer="2"}}': "0+10x40",
        f"convoy_tokens_total{{{RUN}}}": "0+100x40",
    }),
    "ConvoyGoodputLow": ("2h", {
        f'convoy_phase_seconds_total{{{RUN},phase="productive"}}': "0+40x130",
        f'convoy_phase_seconds_total{{{RUN},phase="communication_exposed"}}': "0+8x130",
        f'convoy_phase_seconds_total{{{RUN},phase="restart"}}': "0+12x130",
    }),
}  # fmt: skip
QUIET = {
    "ConvoyRunDown": ("6m", {f"up{{{RUN}}}": "1 0x3 1x10"}),
    "ConvoyRankStuck": ("5m", {f"convoy_stuck_ranks{{{RUN}}}": "0 2 0x5"}),
    # The run was down for long: the last step is old, and this start is young.
    "ConvoyNoStep": ("30m", {START: "1200x40", STEP: "600x40"}),
    "ConvoyNoCheckpoint": ("3h", {START: "9000x200", SAVED: "120x200"}),
    "ConvoyRestartLoop": (
        "40m", {f'convoy_restarts_total{{{RUN},cause="stopped"}}': "0x5 1x5 2x5 3x30"},
    ),
    "ConvoyDiverges": (
        "10m", {
            f'convoy_health_actions_total{{{RUN},action="report"}}': "0x5 1x10",
            f'convoy_skipped_steps_total{{{RUN},reason="overflow"}}': "0x5 9x10",
        },
    ),
    "ConvoyCorruption": ("10m", {f'convoy_corruptions_total{{{RUN},kind="gradients"}}': "2x20"}),
    "ConvoyCheckpointFails": (
        "30m", {f'convoy_checkpoint_failures_total{{{RUN},tier="shared"}}': "0x5 1x40"},
    ),
    "ConvoyCommunicationHigh": ("30m", {
        f"convoy_communication_time_ratio{{{RUN}}}": "0.4x9 0.2 0.4x9 0.2 0.4x9 0.2",
    }),
    "ConvoyDataWaitHigh": ("25m", {
        f"convoy_data_wait_seconds_total{{{RUN}}}": "0+2x30",
        f"convoy_step_duration_seconds_sum{{{RUN}}}": "0+60x30",
    }),
    "ConvoyGpuIdle": ("30m", {f'convoy_gpu_utilization_ratio{{{RUN},rank="3"}}': "0.9x30"}),
    "ConvoyStraggler": ("9m", {f'convoy_straggler_speed_ratio{{{RUN},rank="3"}}': "0.5x30"}),
    "ConvoyDeadExperts": ("40m", {f'convoy_moe_dead_experts{{{RUN},layer="2"}}': "0x40"}),
    "ConvoyTokensDropped": ("35m", {
        f'convoy_moe_dropped_tokens_total{{{RUN},layer="2"}}': "0+1x40",
        f"convoy_tokens_total{{{RUN}}}": "0+100x40",
    }),
    "ConvoyGoodputLow": ("2h", {
        f'convoy_phase_seconds_total{{{RUN},phase="productive"}}': "0+50x130",
        f'convoy_phase_seconds_total{{{RUN},phase="communication_exposed"}}': "0+8x130",
        f'convoy_phase_seconds_total{{{RUN},phase="restart"}}': "0+2x130",
        f'convoy_phase_seconds_total{{{RUN},phase="idle"}}': "0+600x130",
    }),
}  # fmt: skip


def names() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


def promtool(*words: str, text: str | None = None) -> None:
    need("promtool")
    done = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("warn|error|fail", done.stderr, re.IGNORECASE), done.stderr


def fires(folder: Path, cases: dict[str, tuple[str, dict[str, str]]]) -> dict[str, bool]:
    """Whether each alert fires at the time of its case, as promtool evaluates the rules."""
    need("promtool")
    # promtool names the alerts that it got where it was told to expect none.
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": s, "values": v} for s, v in series.items()],
            "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": []}],
        }
        for alert, (at, series) in cases.items()
    ]
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    said = done.stdout + done.stderr
    got = set(re.findall(r"alertname: (\w+), time: ", said))
    assert (done.returncode != 0) == bool(got), said
    return {alert: alert in got for alert in cases}


def test_promtool_accepts_the_rules_and_the_configuration():
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(RULES.parent / "prometheus.yml"))


def test_promtool_finds_no_fault_in_the_metrics(tmp_path):
    registry = CollectorRegistry()
    spec = make_spec(tmp_path, metrics={"dollars_per_rank_hour": 1.0})
    Metrics(registry, spec, Topology(dp_shard=2, ep=2), "1.0").tokens_seen = 1
    RankMetrics(registry, rank=0, host="here", device="cpu")
    promtool("check", "metrics", text=generate_latest(registry).decode())


def test_every_alert_has_a_case_and_its_place_in_the_runbook():
    assert list(FIRES) == list(QUIET) == names()
    text = RULES.read_text()
    links = re.findall(r"runbook_url: docs/operations.md#(\w+)", text)
    assert links == [name.lower() for name in names()]
    assert set(links) <= anchors((ROOT / "docs" / "operations.md").read_text())
    assert text.count("severity: page") + text.count("severity: ticket") == len(names())


def test_every_alert_fires_when_it_should(tmp_path):
    assert fires(tmp_path, FIRES) == dict.fromkeys(FIRES, True)


def test_no_alert_fires_when_it_should_not(tmp_path):
    assert fires(tmp_path, QUIET) == dict.fromkeys(QUIET, False)
