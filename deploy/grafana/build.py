"""Writes convoy.json, the dashboard for Grafana: ``python -m deploy.grafana.build``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "convoy.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}

# Of a panel: title, unit, width of 24, kind, and queries with their legends.
Panel = tuple[str, str, int, str, dict[str, str]]
ROWS: dict[str, list[Panel]] = {
    "Now": [
        ("Step", "none", 3, "stat", {'convoy_step{run=~"$run"}': "{{run}}"}),
        ("Time left", "s", 3, "stat", {'convoy:remaining_seconds{run=~"$run"}': "{{run}}"}),
        ("Since the last step", "s", 3, "stat", {
            'convoy:seconds_since_step{run=~"$run"}': "{{run}}",
        }),
        ("Since the last checkpoint", "s", 3, "stat", {
            'convoy:seconds_since_checkpoint{run=~"$run"}': "{{run}}",
        }),
        ("Goodput", "percentunit", 3, "stat", {'convoy_goodput_ratio{run=~"$run"}': "{{run}}"}),
        ("Ranks", "none", 3, "stat", {'convoy_ranks{run=~"$run"}': "{{run}}"}),
        ("Stuck ranks", "none", 3, "stat", {'convoy_stuck_ranks{run=~"$run"}': "{{run}}"}),
        ("Cost", "currencyUSD", 3, "stat", {'convoy_cost_dollars_total{run=~"$run"}': "{{run}}"}),
    ],
    "Learning": [
        ("Loss", "none", 12, "timeseries", {
            'convoy_loss{run=~"$run"}': "{{run}} train",
            'convoy_validation_loss{run=~"$run"}': "{{run}} validation",
        }),
        ("Gradient norm", "none", 6, "timeseries", {'convoy_grad_norm{run=~"$run"}': "{{run}}"}),
        ("Learning rate", "none", 6, "timeseries", {
            'convoy_learning_rate{run=~"$run"}': "{{run}}",
        }),
        ("Skipped steps", "none", 12, "timeseries", {
            'sum by (run, reason) (increase(convoy_skipped_steps_total{run=~"$run"}[5m]))':
                "{{run}} {{reason}}",
        }),
        ("Signals and actions of the playbook", "none", 12, "timeseries", {
            'sum by (run, rule) (increase(convoy_health_signals_total{run=~"$run"}[5m]))':
                "{{run}} {{rule}}",
            'sum by (run, action) (increase(convoy_health_actions_total{run=~"$run"}[5m]))':
                "{{run}} {{action}}",
        }),
    ],
    "Speed": [
        ("Tokens per second", "none", 8, "timeseries", {
            'convoy_tokens_per_second{run=~"$run"}': "{{run}}",
        }),
        ("Model FLOPs utilization", "percentunit", 8, "timeseries", {
            'convoy_mfu_ratio{run=~"$run"}': "{{run}}",
        }),
        ("Time of a step", "s", 8, "timeseries", {
            'convoy:step_seconds:mean5m{run=~"$run"}': "{{run}} mean",
            'histogram_quantile(0.99, rate(convoy_step_duration_seconds_bucket{run=~"$run"}[5m]))':
                "{{run}} 99 %",
        }),
        ("Exposed communication and waits for data", "percentunit", 8, "timeseries", {
            'convoy_communication_time_ratio{run=~"$run"}': "{{run}} communication",
            'convoy:data_wait_ratio:5m{run=~"$run"}': "{{run}} data",
        }),
        ("Seconds of collectives a second, rank 0", "none", 8, "timeseries", {
            'sum by (run, group) (rate(convoy_collective_seconds_total{run=~"$run"}[5m]))':
                "{{run}} {{group}}",
        }),
        ("Bytes of collectives a second, rank 0", "Bps", 8, "timeseries", {
            'sum by (run, group) (rate(convoy_collective_bytes_total{run=~"$run"}[5m]))':
                "{{run}} {{group}}",
        }),
        ("Tokens a second of each source", "none", 12, "timeseries", {
            'sum by (run, source) (rate(convoy_data_source_tokens_total{run=~"$run"}[5m]))':
                "{{run}} {{source}}",
        }),
        ("Positions without a target", "percentunit", 12, "timeseries", {
            'rate(convoy_data_padding_tokens_total{run=~"$run"}[5m]) / '
            '(rate(convoy_data_padding_tokens_total{run=~"$run"}[5m]) + '
            'rate(convoy_tokens_total{run=~"$run"}[5m]))': "{{run}}",
        }),
    ],
    "Experts": [
        ("Expert load, largest over mean", "none", 8, "timeseries", {
            'convoy_moe_expert_load_imbalance_ratio{run=~"$run"}': "{{run}} layer {{layer}}",
        }),
        ("Router entropy", "none", 8, "timeseries", {
            'convoy_moe_router_entropy_nats{run=~"$run"}': "{{run}} layer {{layer}}",
        }),
        ("Dead experts", "none", 8, "timeseries", {
            'convoy_moe_dead_experts{run=~"$run"}': "{{run}} layer {{layer}}",
        }),
        ("Assignments dropped and rerouted a second", "none", 8, "timeseries", {
            'sum by (run) (rate(convoy_moe_dropped_tokens_total{run=~"$run"}[5m]))':
                "{{run}} dropped",
            'sum by (run) (rate(convoy_moe_rerouted_tokens_total{run=~"$run"}[5m]))':
                "{{run}} rerouted",
        }),
        ("Work of ranks, largest over mean", "none", 8, "timeseries", {
            'convoy_moe_rank_load_imbalance_ratio{run=~"$run"}': "{{run}}",
        }),
        ("Capacity shares", "none", 8, "timeseries", {
            'convoy_moe_capacity_share{run=~"$run"}': "{{run}} rank {{rank}}",
        }),
        ("Load-balancing loss, without its coefficient", "none", 8, "timeseries", {
            'convoy_moe_load_balance_loss{run=~"$run"}': "{{run}} layer {{layer}}",
        }),
        ("Router z-loss, without its coefficient", "none", 8, "timeseries", {
            'convoy_moe_z_loss{run=~"$run"}': "{{run}} layer {{layer}}",
        }),
        ("Auxiliary losses in the loss", "none", 8, "timeseries", {
            'convoy_moe_aux_loss{run=~"$run"}': "{{run}}",
        }),
    ],
    "Ranks": [
        ("Time of a step without waits in collectives, the 8 slowest", "s", 8, "timeseries", {
            'topk(8, convoy_rank_compute_seconds{run=~"$run"})': "{{run}} rank {{rank}}",
        }),
        ("Speed of stragglers", "percentunit", 8, "timeseries", {
            'convoy_straggler_speed_ratio{run=~"$run"}': "{{run}} rank {{rank}}",
        }),
        ("GPU utilization, the 8 lowest", "percentunit", 8, "timeseries", {
            'bottomk(8, convoy_gpu_utilization_ratio{run=~"$run"})': "{{run}} rank {{rank}}",
        }),
        ("Memory of processes (all_ranks), and the peak", "bytes", 8, "timeseries", {
            'convoy_rank_memory_bytes{run=~"$run"}': "{{run}} rank {{process_rank}}",
            'convoy_peak_memory_bytes{run=~"$run"}': "{{run}} peak of a rank",
        }),
        ("GPU memory", "bytes", 8, "timeseries", {
            'convoy_gpu_memory_bytes{run=~"$run"}': "{{run}} rank {{rank}}",
        }),
        ("Power of all GPUs", "watt", 8, "timeseries", {
            'sum by (run) (rate(convoy_gpu_energy_joules_total{run=~"$run"}[5m]))': "{{run}}",
        }),
    ],
    "Time and checkpoints": [
        ("Where the time goes", "s", 12, "timeseries", {
            'sum by (run, phase) (increase(convoy_phase_seconds_total{run=~"$run"}[30m]))':
                "{{run}} {{phase}}",
        }),
        ("What time is lost to", "s", 12, "timeseries", {
            'sum by (run, cause) (increase(convoy_lost_seconds_total{run=~"$run"}[30m]))':
                "{{run}} {{cause}}",
        }),
        ("Restarts", "none", 6, "timeseries", {
            'sum by (run, cause) (convoy_restarts_total{run=~"$run"})': "{{run}} {{cause}}",
        }),
        ("Mean time of saves", "s", 6, "timeseries", {
            'sum by (run, tier, stage) (rate(convoy_checkpoint_duration_seconds_sum{run=~"$run"}'
            '[30m])) / sum by (run, tier, stage) '
            '(rate(convoy_checkpoint_duration_seconds_count{run=~"$run"}[30m]))':
                "{{run}} {{tier}} {{stage}}",
        }),
        ("Last restore", "s", 6, "timeseries", {
            'convoy_restore_duration_seconds{run=~"$run"}': "{{run}} {{tier}}",
        }),
        ("Cost of a billion tokens", "currencyUSD", 6, "timeseries", {
            'convoy_cost_per_billion_tokens_dollars{run=~"$run"}': "{{run}}",
        }),
    ],
}  # fmt: skip


def panel(number: int, x: int, y: int, one: Panel) -> dict[str, Any]:
    """A panel as Grafana has it."""
    title, unit, width, kind, queries = one
    targets = [
        {"refId": chr(65 + i), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for i, (query, legend) in enumerate(queries.items())
    ]
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": 4 if kind == "stat" else 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, ones in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        number = len(panels) + 1
        panels.append({"id": number, "type": "row", "title": title, "gridPos": place, "panels": []})
        x, y = 0, y + 1
        for one in ones:
            if x + one[2] > 24:
                x, y = 0, y + panels[-1]["gridPos"]["h"]
            panels.append(panel(len(panels) + 1, x, y, one))
            x += one[2]
        y += panels[-1]["gridPos"]["h"]
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    run = {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(convoy_job_info, run)", "refId": "run"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "convoy",
        "title": "Convoy",
        "tags": ["convoy"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, run]},
        "annotations": {"list": []},
        "panels": panels,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
