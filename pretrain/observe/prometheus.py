"""Prometheus metrics, published by rank 0 alone and from this file alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from wsgiref.simple_server import WSGIServer

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ckpt import Event
from parallel import Kind, Topology, Traffic
from pretrain.errors import InputError
from pretrain.spec import JobSpec


class Metrics:
    """The metrics of one run, in an injected registry."""

    def __init__(
        self, registry: CollectorRegistry, spec: JobSpec, topology: Topology, version: str
    ) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"convoy_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"convoy_{name}", text, labels, registry=registry)

        gauge("build_info", "Versions; always 1.", "version", "torch_version").labels(
            version, torch.__version__
        ).set(1)
        gauge("job_info", "The job; always 1.", "name", "spec_hash").labels(
            spec.name, spec.hash
        ).set(1)
        degrees = {name: str(degree) for name, degree in topology.as_dict().items()}
        gauge("parallelism_info", "Degrees of the parallel axes; always 1.", *degrees).labels(
            **degrees
        ).set(1)
        self.steps = counter("steps_total", "Committed steps.")
        self.tokens = counter("tokens_total", "Target tokens of committed steps.")
        self.step_duration = Histogram(
            "convoy_step_duration_seconds",
            "Wall time of a step, with its barrier and update.",
            buckets=[0.01 * 2**i for i in range(16)],
            registry=registry,
        )
        self.loss = gauge("loss", "Mean loss of the last step in nats per token.")
        self.grad_norm = gauge("grad_norm", "Global gradient norm of the last step, unclipped.")
        self.learning_rate = gauge("learning_rate", "Learning rate of the last step.")
        self.skipped = counter("skipped_steps_total", "Steps that changed nothing.", "reason")
        self.overflows = counter(
            "overflows_total", "Steps skipped for gradients too large for float16."
        )
        self.rate = gauge("tokens_per_second", "Target tokens per second of the last step.")
        self.model_flops = counter(
            "model_flops_total", "Operations that the model's products need, of committed steps."
        )
        self.mfu = gauge("mfu_ratio", "Model FLOPs of the last step over what its devices can do.")
        self.data_wait = counter(
            "data_wait_seconds_total", "Time the slowest rank waited for data."
        )
        self.cursor = gauge("data_cursor_samples", "The next sample index.")
        self.collective_seconds = counter(
            "collective_seconds_total", "Seconds of collectives on rank 0.", "op", "group"
        )
        self.collective_bytes = counter(
            "collective_bytes_total", "Bytes that rank 0 gave to collectives.", "op", "group"
        )
        self.communication = gauge(
            "communication_time_ratio", "Share of a step in which ranks wait in collectives."
        )
        self.imbalance = gauge(
            "moe_expert_load_imbalance_ratio", "Largest over mean load of an expert.", "layer"
        )
        self.dead = gauge("moe_dead_experts", "Experts without a token in a log interval.", "layer")
        self.entropy = gauge(
            "moe_router_entropy_nats", "Mean entropy of a token's probabilities.", "layer"
        )
        self.dropped = counter(
            "moe_dropped_tokens_total", "Assignments that no expert had room for.", "layer"
        )
        self.rerouted = counter(
            "moe_rerouted_tokens_total", "Assignments that took another expert.", "layer"
        )
        self.rank_imbalance = gauge(
            "moe_rank_load_imbalance_ratio", "Largest over mean expert work of a rank."
        )
        self.capacity_share = gauge(
            "moe_capacity_share", "Planned expert work of a rank over its group's mean.", "rank"
        )
        self.relative_speed = gauge(
            "rank_relative_speed_ratio", "Expert speed of a rank over its group's mean.", "rank"
        )
        self.bias = gauge("moe_router_bias_abs_max", "Largest bias of an expert, in magnitude.")
        self.save_duration = Histogram(
            "convoy_checkpoint_duration_seconds",
            "What training waited (stall), until this rank's part was durable (write), and until "
            "all was (commit).",
            ["tier", "stage"],
            buckets=[0.01 * 2**i for i in range(16)],
            registry=registry,
        )
        self.restore_duration = gauge("restore_duration_seconds", "Time of this run's restore.")
        self.last_checkpoint = gauge(
            "last_checkpoint_timestamp_seconds", "Unix time of the last commit."
        )
        self.last_step = gauge("last_step_timestamp_seconds", "Unix time of the last step.")

    def record_step(self, seconds: float, data_wait_seconds: float) -> None:
        """After each step, which took ``seconds`` with its barrier and update."""
        self.step_duration.observe(seconds)
        self.data_wait.inc(data_wait_seconds)
        self.last_step.set(time.time())

    def record_skip(self, reason: str, overflow: bool) -> None:
        """After each step that changed nothing."""
        self.skipped.labels(reason).inc()
        self.overflows.inc(overflow)

    def record_commit(
        self,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        target_tokens: int,
        cursor: int,
        seconds: float,
    ) -> None:
        """After each committed step."""
        self.steps.inc()
        self.tokens.inc(target_tokens)
        self.loss.set(loss)
        self.grad_norm.set(grad_norm)
        self.learning_rate.set(lr)
        self.rate.set(target_tokens / seconds)
        self.cursor.set(cursor)

    def record_flops(self, flops: float, mfu: float) -> None:
        """After each committed step."""
        self.model_flops.inc(flops)
        self.mfu.set(mfu)

    def record_traffic(self, traffic: Mapping[Kind, Traffic]) -> None:
        """After each step: this rank's collectives in it."""
        for (op, group), one in traffic.items():
            self.collective_seconds.labels(op, group).inc(one.seconds)
            self.collective_bytes.labels(op, group).inc(one.bytes)

    def record_routing(
        self,
        layers: list[int],
        tokens_per_expert: list[list[int]],
        entropies: list[float],
        moved: list[list[int]],
        bias: float | None,
    ) -> None:
        """After each log interval: what the routers of ``layers`` did in it, over all ranks."""
        if bias is not None:
            self.bias.set(bias)
        rows = zip(layers, tokens_per_expert, entropies, moved, strict=True)
        for layer, counts, entropy, (dropped, rerouted) in rows:
            mean = sum(counts) / len(counts)
            self.imbalance.labels(str(layer)).set(max(counts) / max(mean, 1e-9))
            self.dead.labels(str(layer)).set(counts.count(0))
            self.entropy.labels(str(layer)).set(entropy)
            self.dropped.labels(str(layer)).inc(dropped)
            self.rerouted.labels(str(layer)).inc(rerouted)

    def record_capacity(self, shares: list[float], relative_speeds: list[float]) -> None:
        """After each log interval, of all ranks in order."""
        for rank, (share, speed) in enumerate(zip(shares, relative_speeds, strict=True)):
            self.capacity_share.labels(str(rank)).set(share)
            self.relative_speed.labels(str(rank)).set(speed)

    def record_stall(self, seconds: float) -> None:
        """After each save was begun: what training waited."""
        self.save_duration.labels("memory", "stall").observe(seconds)

    def record_save(self, event: Event) -> None:
        """After each commit to a tier."""
        tier = str(event.tier)
        self.save_duration.labels(tier, "write").observe(event.write_seconds)
        self.save_duration.labels(tier, "commit").observe(event.seconds)
        self.last_checkpoint.set(time.time())


class Endpoint:
    """An HTTP server for a registry. ``port`` 0 takes a free one.

    Raises InputError where the port is taken.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, socket.gaierror) as error:
            raise InputError(
                f"metrics.host and metrics.port ({host}:{port}) cannot be listened on: "
                f"{error.strerror}; 0 takes a free port, -1 none"
            ) from None
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
