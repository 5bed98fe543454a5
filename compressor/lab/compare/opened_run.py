"""Open a run's report and its results sample by sample, as the run wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from compressor.errors import DataError, InputError, SpecError
from compressor.lab.inspect.run_output import MANIFEST, REPORT, inspect_run
from compressor.progress import Progress
from compressor.run.artifacts import SAMPLES
from compressor.types.tensors import Array

SCHEMA = 1
_AGAIN = "run the spec again with this version; finished passes are not done again"


@dataclass(frozen=True)
class OpenedRun:
    """A run whose report is as the run wrote it.

    Attributes:
        path: as the user named it.
        folder: the run's output.
        report: the content of ``report.json``.
        missing: names of files that the run wrote and that are not here.
    """

    path: str
    folder: Path
    report: Mapping[str, Any]
    missing: frozenset[str]

    @cached_property
    def samples(self) -> Mapping[str, Array]:
        """The metric's value for each sample, float64 ``[N]``, by model; empty without a metric.

        Raises:
            InputError: the file is not here.
            DataError: it cannot be read.
        """
        entry = self.report["per_sample"]
        if entry is None:
            return {}
        path = self.folder / str(entry["file"])
        if path.name in self.missing:
            raise InputError(
                f"run {self.path!r}",
                f"has no {path.name}, which holds the results of single samples",
                f"copy it together with {REPORT} and {MANIFEST}, or run the spec again",
            )
        try:
            with np.load(path, allow_pickle=False) as stored:
                return {name: stored[name].astype(np.float64) for name in stored.files}
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise DataError(
                f"file {str(path)!r}", f"cannot be read ({error})", "run the spec again"
            ) from error


def open_run(path: Path, progress: Progress) -> OpenedRun:
    """Open a run, and compare its files with its manifest.

    Args:
        path: the output folder, or the ``report.json`` in it.
        progress: shows how far the comparison of the files is.

    Raises:
        SpecError: there is no run.
        InputError: a file was changed since the run, or is of another version.
    """
    subject = f"run {str(path)!r}"
    folder = path if path.is_dir() else path.parent
    if not path.exists() or (path.is_file() and path.name != REPORT):
        raise SpecError(
            subject,
            "is no report" if path.exists() else "does not exist",
            f"name the output folder of a run, or its {REPORT}",
        )
    if not (folder / REPORT).is_file():
        raise SpecError(subject, f"has no {REPORT}", "name the output folder of a run")
    if not (folder / MANIFEST).is_file():
        raise InputError(
            subject,
            f"has no {MANIFEST}, so nobody can say whether {REPORT} is what the run wrote",
            f"copy both, and {SAMPLES}, from the run's output",
        )
    contents = inspect_run(folder, progress)
    changed = [file.name for file in contents.files if file.state == "changed"]
    if changed or contents.report is None:
        raise InputError(
            subject,
            f"{', '.join(changed) or REPORT} does not match {MANIFEST}: "
            "it was edited or replaced after the run",
            "run the spec again; finished passes are not done again",
        )
    _check(subject, contents.report)
    missing = frozenset(file.name for file in contents.files if file.state == "missing")
    return OpenedRun(str(path), folder, contents.report, missing)


def _check(subject: str, report: Mapping[str, Any]) -> None:
    """Refuse what this version cannot read."""
    schema = report.get("schema")
    if schema != SCHEMA:
        raise InputError(
            subject, f"has a report of schema {schema}, and this version reads {SCHEMA}", _AGAIN
        )
    if not {"identity", "per_sample"} <= set(report):
        raise InputError(
            subject, "was made by a version that kept no results of single samples", _AGAIN
        )
