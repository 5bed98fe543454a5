"""How a model's metric, size and latency went from run to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import SpecError
from compressor.lab.compare.history import Entry, append, check_fits, entry_of, read_history
from compressor.lab.compare.runs import Allowed, Side, open_run
from compressor.progress import Progress
from compressor.report.verdict import main_artifact
from compressor.run.artifacts import FLOAT
from compressor.run.verdicts.statistics import Step, find_steps, paired_difference

METHOD = "binary segmentation, each cut judged by a paired test over the samples"


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        label: what the user calls it, or its place in the history.
        latency_ms: median latency, where it was timed.
    """

    label: str
    value: float
    ci95: tuple[float, float]
    bytes: int
    latency_ms: float | None


@dataclass(frozen=True)
class LevelChange:
    """A run at which the metric stepped.

    Attributes:
        index: the run's place among the points.
        drop: how much worse the level after it is than that before; negative where it is better.
        p: chance of such a step without any.
    """

    index: int
    label: str
    drop: float
    ci95: tuple[float, float]
    p: float


@dataclass(frozen=True)
class Trend:
    """A history as data, to be drawn or printed.

    Attributes:
        unit: its unit, ``%`` or empty.
    """

    metric: str
    unit: str
    higher_is_better: bool
    points: tuple[Point, ...]
    changes: tuple[LevelChange, ...]
    method: str = METHOD

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def trend_of(entries: Sequence[Entry]) -> Trend:
    """Find where a model's metric stepped down or up.

    Args:
        entries: the history, not empty; all of one metric on the same data.
    """
    last = entries[-1]
    results = np.stack([entry.per_sample() for entry in entries])
    names = [entry.label or f"run {number}" for number, entry in enumerate(entries, 1)]
    points = tuple(
        Point(
            name,
            entry.metric.value,
            (entry.metric.ci95[0], entry.metric.ci95[1]),
            entry.bytes,
            entry.latency_ms,
        )
        for name, entry in zip(names, entries, strict=True)
    )
    changes = tuple(_change(entries, results, names, step) for step in find_steps(results))
    return Trend(
        metric=last.metric.name,
        unit=last.metric.unit,
        higher_is_better=last.metric.higher_is_better,
        points=points,
        changes=changes,
    )


def _change(
    entries: Sequence[Entry], results: np.ndarray, names: Sequence[str], step: Step
) -> LevelChange:
    before = results[step.start : step.index].mean(axis=0)
    after = results[step.index : step.end].mean(axis=0)
    difference = paired_difference(before, after, entries[-1].metric_scale())
    return LevelChange(step.index, names[step.index], difference.drop, difference.ci95, step.p)


def record_run(output: Path, path: Path, label: str, progress: Progress) -> Trend:
    """Add a run's main artifact to a history, as :func:`record` does.

    Args:
        output: the run's folder, with all of its files.
    """
    run = open_run(output, progress)
    entry = main_artifact(run.report)
    name, measured = (FLOAT, run.report["baseline"]) if entry is None else (entry["path"], entry)
    return record(path, Side(run, name, measured), label, ())


def record(path: Path, side: Side, label: str, allowed: Collection[Allowed]) -> Trend:
    """Add a run to a history, new or old, and return the trend with it.

    Args:
        allowed: in what it may differ from the runs before.

    Raises:
        SpecError: the run does not belong to the history, or the file cannot be written.
        InputError: a line of the history is damaged.
        DataError: the run has no metric.
    """
    entries, new = read_history(path), entry_of(side, label)
    check_fits(entries, new, path, allowed)
    return trend_of(append(path, entries, new))


def recall(path: Path, side: Side, allowed: Collection[Allowed]) -> Trend:
    """Return the trend of a history with a run at its end, and write nothing.

    Raises:
        SpecError: the history is empty, or the run does not belong to it.
        InputError: a line of the history is damaged.
        DataError: the run has no metric.
    """
    entries = read_history(path)
    if not entries:
        raise SpecError(
            f"history {str(path)!r}",
            "is empty" if path.exists() else "does not exist",
            "compress gate --history begins one, and adds a run at each call",
        )
    last = entries[-1]
    new = entry_of(side, "this run")
    check_fits(entries, new, path, allowed)
    recorded = (last.sha256, last.spec, last.samples) == (new.sha256, new.spec, new.samples)
    return trend_of(entries if recorded else [*entries, new])
