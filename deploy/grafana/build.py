"""Writes convoy.json, the dashboard for Grafana: ``python -m deploy.grafana.build``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "convoy.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}

# Of a panel: title, unit, width of 24, and queries. Each metric is that of the chosen runs. Behind
# "#" is what a legend says after the run, where it is not the labels of "sum by".
Panel = tuple[str | int, ...]
ROWS: dict[str, list[Panel]] = {
    "Now": [
        ("Step", "none", 3, "convoy_step"),
        ("Time left", "s", 3, "convoy:remaining_seconds"),
        ("Since the last step", "s", 3, "convoy:seconds_since_step"),
        ("Since the last checkpoint", "s", 3, "convoy:seconds_since_checkpoint"),
        ("Goodput", "percentunit", 3, "convoy_goodput_ratio"),
        ("Ranks", "none", 3, "convoy_ranks"),
        ("Stuck ranks", "none", 3, "convoy_stuck_ranks"),
        ("Cost", "currencyUSD", 3, "convoy_cost_dollars_total"),
    ],
    "Learning": [
        ("Loss", "none", 12, "convoy_loss # train", "convoy_validation_loss # validation"),
        ("Gradient norm", "none", 6, "convoy_grad_norm"),
        ("Learning rate", "none", 6, "convoy_learning_rate"),
        ("Skipped steps", "none", 12,
         "sum by (run, reason) (increase(convoy_skipped_steps_total[5m]))"),
        ("Signals and actions of the playbook", "none", 12,
         "sum by (run, rule) (increase(convoy_health_signals_total[5m]))",
         "sum by (run, action) (increase(convoy_health_actions_total[5m]))"),
    ],
    "Speed": [
        ("Tokens per second", "none", 8, "convoy_tokens_per_second"),
        ("Model FLOPs utilization", "percentunit", 8, "convoy_mfu_ratio"),
        ("Time of a step", "s", 8,
         "convoy:step_seconds:mean5m # mean",
         "histogram_quantile(0.99, rate(convoy_step_duration_seconds_bucket[5m])) # 99 %"),
        ("Exposed communication and waits for data", "percentunit", 8,
         "convoy_communication_time_ratio # communication",
         "convoy:data_wait_ratio:5m # data"),
        ("Seconds of collectives a second, rank 0", "none", 8,
         "sum by (run, group) (rate(convoy_collective_seconds_total[5m]))"),
        ("Bytes of collectives a second, rank 0", "Bps", 8,
         "sum by (run, group) (rate(convoy_collective_bytes_total[5m]))"),
        ("Tokens a second of each source", "none", 12,
         "sum by (run, source) (rate(convoy_data_source_tokens_total[5m]))"),
        ("Positions without a target", "percentunit", 12,
         "rate(convoy_data_padding_tokens_total[5m]) / "
         "(rate(convoy_data_padding_tokens_total[5m]) + rate(convoy_tokens_total[5m]))"),
    ],
    "Experts": [
        ("Expert load, largest over mean", "none", 8,
         "convoy_moe_expert_load_imbalance_ratio # layer {{layer}}"),
        ("Expert load over its layer's mean, over all layers", "none", 8,
         "convoy_moe_expert_load_ratio # {{quantile}}"),
        ("Router entropy", "none", 8, "convoy_moe_router_entropy_nats # layer {{layer}}"),
        ("Dead experts", "none", 8, "convoy_moe_dead_experts # layer {{layer}}"),
        ("Assignments dropped and rerouted a second", "none", 8,
         "sum by (run) (rate(convoy_moe_dropped_tokens_total[5m])) # dropped",
         "sum by (run) (rate(convoy_moe_rerouted_tokens_total[5m])) # rerouted"),
        ("Work of ranks, largest over mean", "none", 8, "convoy_moe_rank_load_imbalance_ratio"),
        ("Capacity shares", "none", 8, "convoy_moe_capacity_share # rank {{rank}}"),
        ("Load-balancing loss, without its coefficient", "none", 8,
         "convoy_moe_load_balance_loss # layer {{layer}}"),
        ("Router z-loss, without its coefficient", "none", 8,
         "convoy_moe_z_loss # layer {{layer}}"),
        ("Auxiliary losses in the loss", "none", 8, "convoy_moe_aux_loss"),
    ],
    "Ranks": [
        ("Time of a step without waits in collectives, the 8 slowest", "s", 8,
         "topk(8, convoy_rank_compute_seconds) # rank {{rank}}"),
        ("Speed of stragglers", "percentunit", 8, "convoy_straggler_speed_ratio # rank {{rank}}"),
        ("GPU utilization, the 8 lowest", "percentunit", 8,
         "bottomk(8, convoy_gpu_utilization_ratio) # rank {{rank}}"),
        ("Memory of processes (all_ranks), and the peak", "bytes", 8,
         "convoy_rank_memory_bytes # rank {{process_rank}}",
         "convoy_peak_memory_bytes # peak of a rank"),
        ("GPU memory", "bytes", 8, "convoy_gpu_memory_bytes # rank {{rank}}"),
        ("Power of all GPUs", "watt", 8, "sum by (run) (rate(convoy_gpu_energy_joules_total[5m]))"),
    ],
    "Time and checkpoints": [
        ("Where the time goes", "s", 12,
         "sum by (run, phase) (increase(convoy_phase_seconds_total[30m]))"),
        ("What time is lost to", "s", 12,
         "sum by (run, cause) (increase(convoy_lost_seconds_total[30m]))"),
        ("Restarts", "none", 6, "sum by (run, cause) (convoy_restarts_total)"),
        ("Mean time of saves", "s", 6,
         "sum by (run, tier, stage) (rate(convoy_checkpoint_duration_seconds_sum[30m])) / "
         "sum by (run, tier, stage) (rate(convoy_checkpoint_duration_seconds_count[30m]))"),
        ("Last restore", "s", 6, "convoy_restore_duration_seconds # {{tier}}"),
        ("Cost of a billion tokens", "currencyUSD", 6, "convoy_cost_per_billion_tokens_dollars"),
    ],
}  # fmt: skip


def target(number: int, row: str) -> dict[str, Any]:
    """A query of a panel as Grafana has it."""
    query, _, legend = row.partition(" # ")
    if not legend and (labels := re.search(r"sum by \(run, ([\w, ]+)\)", query)):
        legend = re.sub(r"(\w+),?", r"{{\1}}", labels[1])
    return {
        "refId": chr(65 + number),
        "datasource": SOURCE,
        "expr": re.sub(r"\bconvoy[_:][\w:]+", r'\g<0>{run=~"$run"}', query),
        "legendFormat": f"{{{{run}}}} {legend}".strip(),
    }


def panel(number: int, x: int, y: int, kind: str, row: Panel) -> dict[str, Any]:
    """A panel as Grafana has it."""
    title, unit, width, *queries = row
    return {
        "id": number,
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": 4 if kind == "stat" else 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [target(index, str(query)) for index, query in enumerate(queries)],
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, rows in ROWS.items():
        area = {"x": 0, "y": y, "w": 24, "h": 1}
        number = len(panels) + 1
        panels.append({"id": number, "type": "row", "title": title, "gridPos": area, "panels": []})
        x, y, kind = 0, y + 1, "stat" if title == "Now" else "timeseries"
        for row in rows:
            width = int(row[2])
            if x + width > 24:
                x, y = 0, y + panels[-1]["gridPos"]["h"]
            panels.append(panel(len(panels) + 1, x, y, kind, row))
            x += width
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
