"""Put a run into a history, or look at it beside one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from compressor.comparison.history import append, check_fits, entry_of, read_history
from compressor.comparison.opened_run import FLOAT, open_run
from compressor.comparison.sides import Allowed, Side
from compressor.comparison.trend import Trend, trend_of
from compressor.errors import SpecError
from compressor.progress import Progress
from compressor.report.verdict import main_artifact


def record_run(output: Path, path: Path, label: str, progress: Progress) -> Trend:
    """Add what a run judges first to a history, and return the trend with it.

    Args:
        output: the run's folder, with all of its files.
        path: the history.
        label: what the run is called.
        progress: shows how far the comparison of the files is.

    Raises:
        SpecError: the run does not belong to the history, or the file cannot be written.
        InputError: a line of the history is damaged.
        DataError: the run has no metric.
    """
    run = open_run(output, progress)
    entry = main_artifact(run.report)
    name, found = (FLOAT, run.report["baseline"]) if entry is None else (entry["path"], entry)
    return record(path, Side(run, name, found), label, ())


def record(path: Path, side: Side, label: str, allowed: Collection[Allowed]) -> Trend:
    """Add a run to a history, which is begun where there is none, and return the trend with it.

    Args:
        path: the history.
        side: the run's model.
        label: what the run is called.
        allowed: in what it may differ from the runs before.

    Raises:
        SpecError: the run does not belong to the history, or the file cannot be written.
        InputError: a line of the history is damaged.
        DataError: the run has no metric.
    """
    entries, new = read_history(path), entry_of(side, label)
    check_fits(entries, new, path, other_model="model" in allowed)
    return trend_of(append(path, entries, new))


def recall(path: Path, side: Side, allowed: Collection[Allowed]) -> Trend:
    """Return the trend of a history with a run at its end, and write nothing.

    Args:
        path: the history.
        side: the run's model.
        allowed: in what it may differ from the runs before.

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
    check_fits(entries, new, path, other_model="model" in allowed)
    known = (last.sha256, last.spec, last.samples) == (new.sha256, new.spec, new.samples)
    return trend_of(entries if known else [*entries, new])
