"""Numbers of the connector, as vLLM collects and exports them: `vllm:orbitkv_*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


@dataclass(frozen=True)
class Metric:
    """One number. Gauges are levels, counters count what happened since the last report."""

    name: str
    gauge: bool
    documentation: str

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"vllm:orbitkv_{self.name}" + ("" if self.gauge else "_total")


METRICS: tuple[Metric, ...] = (
    Metric("attached", True, "1 while the scheduler is attached to an agent and may hit."),
    Metric("admission_gate", True, "1 when other lookups wait while a restored request has not begun to compute."),
    Metric("pending_queries", True, "Requests that wait for the answer of a query."),
    Metric("pending_restores", True, "Requests whose pages are being restored."),
    Metric("pending_saves", True, "Saves that have not ended on every worker."),
    Metric("held_requests", True, "Finished requests whose blocks are held until their saves have left them."),
    Metric("breaker_open", True, "1 while the agent is too slow to be asked."),
    Metric("queries", False, "Queries sent to the agent."),
    Metric("query_waits_exceeded", False, "Queries given up after max_wait_ms."),
    Metric("breaker_trips", False, "Times that the agent did not answer within a step's allowance."),
    Metric("restores", False, "Restores that began."),
    Metric("restore_failures", False, "Restores that failed; their tokens were computed."),
    Metric("restores_overlapped", False, "Restores whose request began before they were over."),
    Metric("saves", False, "Saves handed to the workers."),
    Metric("save_failures", False, "Saves of which at least one worker kept less than all pages."),
    Metric("prompt_tokens_hbm", False, "Tokens found in the engine's own cache when a request was admitted."),
    Metric("prompt_tokens_restored", False, "Tokens restored by OrbitKV when a request was admitted."),
    Metric("prompt_tokens_computed", False, "Tokens left to compute when a request was admitted."),
    Metric("errors", False, "Errors inside the connector, each contained to one request."),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


@dataclass
class OrbitKVStats(KVConnectorStats):
    """Numbers by metric name since the last report."""

    data: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self.data[name] = self.data.get(name, 0) + amount

    def level(self, name: str, value: int) -> None:
        """Set a gauge."""
        self.data[name] = value

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add a later report, or another process's: counters add up, levels are taken over."""
        for name, value in other.data.items():
            if name in _BY_NAME and _BY_NAME[name].gauge:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data


class OrbitKVPromMetrics(KVConnectorPromMetrics):
    """The same numbers in Prometheus, one series an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[str, dict[int, Any]] = {}
        for metric in METRICS:
            kind = metric_types[Gauge if metric.gauge else Counter]
            family = kind(
                name=f"vllm:orbitkv_{metric.name}", documentation=metric.documentation, labelnames=list(labelnames)
            )
            self._series[metric.name] = {
                engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take a report over."""
        for name, value in transfer_stats_data.items():
            metric = _BY_NAME.get(name)
            if metric is None:
                continue
            series = self._series[name][engine_idx]
            if metric.gauge:
                series.set(value)
            else:
                series.inc(value)
