"""Prometheus metrics of the goodput ledger: where the wall time went, and what that cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pretrain.observe.ledger import Ledger


class LedgerMetrics(Collector):
    """The metrics of the goodput ledger, made when they are asked for.

    The counters continue over restarts: the ledger is that of the whole log.

    Args:
        ledger: the ledger now.
        dollars_per_rank_hour: the price of a rank; without it there are no metrics of cost.
        tokens_seen: the target tokens of all committed steps now.
    """

    def __init__(
        self,
        ledger: Callable[[], Ledger],
        *,
        dollars_per_rank_hour: float | None = None,
        tokens_seen: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ledger, self._tokens_seen = ledger, tokens_seen
        self._price = dollars_per_rank_hour

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        ledger = self._ledger()
        yield GaugeMetricFamily(
            "convoy_goodput_ratio",
            "Share of productive time in the wall time that the run was not idle.",
            value=ledger.goodput or 0.0,
        )
        for name, text, label, values in (
            ("phase_seconds", "Wall time of the run by phase.", "phase", ledger.seconds),
            ("lost_seconds", "Wall time that was not productive.", "cause", ledger.lost_seconds),
            ("restarts", "Starts after the first.", "cause", ledger.restarts),
        ):
            family = CounterMetricFamily(f"convoy_{name}", text, labels=[label])
            for key, value in values.items():
                family.add_metric([key], value)
            yield family
        if self._price is None:
            return
        dollars = ledger.rank_seconds / 3600 * self._price
        yield CounterMetricFamily(
            "convoy_cost_dollars",
            "Price of the ranks for the run's wall time without idle, over all starts.",
            value=dollars,
        )
        if tokens := self._tokens_seen():
            yield GaugeMetricFamily(
                "convoy_cost_per_billion_tokens_dollars",
                "Cost so far over the target tokens of all committed steps.",
                value=dollars / tokens * 1e9,
            )
