"""``stats()`` for Prometheus: a collector to register, and the same as text. Needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .counters import stats

_COUNTERS = {
    "graphs": "FX graphs received from Dynamo, or recorded",
    "unique_pieces": "Distinct pieces compiled",
    "captures": "CUDA graphs captured: pieces x buckets x variants",
    "replays": "Plans replayed",
}
_GAUGES = {
    "pieces": "Captured pieces of all live graphs",
    "cuts": "Cuts of all live graphs",
    "pool_bytes": "Bytes held by graph pools",
}


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ImportError("metrics: needs prometheus-client; pip install 'sparse-pcg[metrics]'") from error
    return prometheus_client


class StatsCollector:
    """``prometheus_client.REGISTRY.register(StatsCollector())`` exports the counters anew at each scrape.

    Metrics are named ``sparse_pcg_...``; fallbacks have the label ``reason``. ``reset()`` sets counters back to zero,
    which Prometheus takes for a restart.
    Raises ImportError where prometheus-client is not installed.
    """

    def __init__(self) -> None:
        self._client = _client()

    def collect(self) -> Iterator[Any]:
        """The metrics now."""
        core, now = self._client.core, stats()
        for name, text in _COUNTERS.items():
            yield core.CounterMetricFamily(f"sparse_pcg_{name}", text, value=getattr(now, name))
        for name, text in _GAUGES.items():
            yield core.GaugeMetricFamily(f"sparse_pcg_{name}", text, value=getattr(now, name))
        left = core.CounterMetricFamily(
            "sparse_pcg_fallbacks", "Calls that left the captured graphs, by reason", labels=["reason"]
        )
        for reason, count in sorted(now.fallbacks.items()):
            left.add_metric([reason], count)
        yield left


def metrics_text() -> str:
    """The counters now, in Prometheus' text format. Raises ImportError where prometheus-client is not installed."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(StatsCollector())
    return str(client.generate_latest(registry).decode())
