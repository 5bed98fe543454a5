"""The runs before this one, as the report shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PastRun:
    """One run of a history.

    Attributes:
        label: what it is called.
        value: the metric.
        low: lower end of its interval.
        high: upper end.
        stepped: the metric is on another level from this run on.
        texts: metric, interval, size and latency, for a table.
    """

    label: str
    value: float
    low: float
    high: float
    stepped: bool
    texts: tuple[str, ...]


@dataclass(frozen=True)
class PastRuns:
    """A history.

    Attributes:
        runs: the oldest first; the last one is this run.
        steps: where the metric stepped, or that it did not, a sentence each.
    """

    runs: tuple[PastRun, ...]
    steps: tuple[str, ...]
