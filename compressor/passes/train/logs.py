"""Logs of a training, written as it goes: CSV, and TensorBoard's event files."""

from __future__ import annotations

import csv
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from pydantic import Field, model_validator

from compressor.errors import InputError
from compressor.files import disk_errors
from compressor.types.options import Options
from compressor.types.training import TrainingStep

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_COLUMNS = ("pass", "step", "loss", "learning-rate", "validation")


class Log(Options):
    """Files that the course of a training is written to; paths are relative to the spec."""

    csv: str | None = Field(
        default=None,
        min_length=1,
        description="a file with one row per step; rows of other passes stay",
    )
    tensorboard: str | None = Field(
        default=None,
        min_length=1,
        description="a folder of event files, in one below for each pass; needs the package "
        "tensorboard",
    )

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.csv is None and self.tensorboard is None:
            raise ValueError("names no file; give csv or tensorboard")
        if self.tensorboard is not None and find_spec("tensorboard") is None:
            raise ValueError(
                "tensorboard needs the package tensorboard, which is not installed; run "
                'pip install "compressor[tensorboard]"'
            )
        return self


class TrainingLog:
    """Writes the steps of one training, of which only those after ``start`` are still to come.

    Steps that an interrupted process wrote after its last saved state are written again.

    Args:
        folder: what relative paths start from.
        start: steps that an earlier process has done.
        label: tells it from other trainings, which may share its files.
    """

    def __init__(self, log: Log, folder: Path, start: int, label: str):
        self._log, self._label = log, label
        self._folder = folder
        self._start = start
        self._open = ExitStack()
        self._rows: csv.DictWriter[str] | None = None
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __call__(self, step: TrainingStep) -> None:
        """Write a step.

        Raises:
            InputError: the file is no such log, or cannot be written.
        """
        if self._log.csv is not None:
            self._add_row(self._folder / self._log.csv, step)
        if self._log.tensorboard is not None:
            self._add_events(self._folder / self._log.tensorboard, step)

    def _add_row(self, path: Path, step: TrainingStep) -> None:
        with disk_errors(path):
            if self._rows is None:
                self._open_rows(path, step)
            assert self._rows is not None
            assert self._file is not None
            terms = step.terms if len(step.terms) > 1 else {}
            values = (self._label, step.step, step.loss, step.learning_rate, step.validation)
            self._rows.writerow({**dict(zip(_COLUMNS, values, strict=True)), **terms})
            self._file.flush()

    def _open_rows(self, path: Path, step: TrainingStep) -> None:
        columns = [*_COLUMNS, *(step.terms if len(step.terms) > 1 else ())]
        kept = []
        if path.exists():
            held, rows = _read(path)
            columns += [name for name in held if name not in columns]
            kept = [r for r in rows if r["pass"] != self._label or int(r["step"]) <= self._start]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open.enter_context(path.open("w", encoding="utf-8", newline=""))
        self._rows = csv.DictWriter(self._file, columns, restval="", lineterminator="\n")
        self._rows.writeheader()
        self._rows.writerows(kept)

    def _add_events(self, folder: Path, step: TrainingStep) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with disk_errors(folder):
            if self._events is None:
                folder.mkdir(parents=True, exist_ok=True)
                # Viewers forget what comes after it in all files of that folder.
                own = str(folder / self._label)
                self._events = SummaryWriter(own, purge_step=self._start + 1)
                self._open.callback(self._events.close)
            values = {"loss": step.loss, "learning-rate": step.learning_rate}
            values |= {f"loss/{n}": v for n, v in step.terms.items() if len(step.terms) > 1}
            if step.validation is not None:
                values["validation"] = step.validation
            for name, value in values.items():
                self._events.add_scalar(f"{step.name}/{name}", value, step.step)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the rows of a log; a last row that is cut off is left out.

    Raises:
        InputError: the file is none.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row and None not in row.values()]
            columns = list(reader.fieldnames or ())
    except (UnicodeDecodeError, csv.Error):
        columns, rows = [], []
    ours = columns[: len(_COLUMNS)] == list(_COLUMNS)
    if not ours or not all(row["step"].isdigit() for row in rows):
        raise InputError(f"log.csv {path}", "is no log of a training", "name another file")
    return columns, rows
