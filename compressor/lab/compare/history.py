"""The history of a model: a file with one line for each run, kept with the project."""

from __future__ import annotations

import base64
import binascii
import json
import os
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, Field

from compressor.errors import DataError, InputError, ModelError, SpecError
from compressor.files import disk_errors, strict_json
from compressor.lab.compare.runs import Allowed, Side, direction, short
from compressor.lab.verify.forms import (
    Count,
    Form,
    MetricForm,
    Positive,
    ScaleForm,
    check_form,
)
from compressor.run.metrics.metrics import kept_scale
from compressor.run.verdicts.statistics import Scale
from compressor.types.option_errors import SpecErrors
from compressor.types.tensors import Array

_REMEDY = "correct or remove that line"


class Entry(Form):
    """A run as a line of a history.

    Attributes:
        label: what the user calls the run, such as its commit; may be empty.
        sha256: of the artifact; ``None`` for the float model.
        metric_code: hash of the metric's code; empty for a built-in one, ``None`` in lines of
            earlier versions.
        latency_ms: median for the smallest batch, where it was timed.
        samples: results of single samples: a bit each where they are right or wrong, else as
            32-bit floats; compressed, in base 64.
    """

    model_config = ConfigDict(extra="forbid")

    schema_: Literal[1] = Field(alias="schema")
    name: str
    artifact: str
    label: str
    version: str
    model: str
    data: str
    spec: str
    sha256: str | None
    metric: MetricForm
    metric_code: str | None = None
    scale: ScaleForm
    bytes: Count
    latency_ms: Positive | None
    samples: str

    def per_sample(self) -> Array:
        """Return the metric's value for each sample, float64 ``[N]``.

        Raises:
            ValueError: the text is not what was written.
        """
        count = self.metric.samples
        most = 4 * count  # bytes
        try:
            packed = base64.b64decode(self.samples[1:], validate=True)
            raw = zlib.decompressobj().decompress(packed, most + 1)
        except (binascii.Error, zlib.error) as error:
            raise ValueError(str(error)) from error
        if self.samples[:1] == "b":
            values = np.unpackbits(np.frombuffer(raw, np.uint8))[:count].astype(np.float64)
        else:
            values = np.frombuffer(raw, "<f4").astype(np.float64)
        if values.size != count:
            raise ValueError(f"{values.size} results for {count} samples")
        return values

    def metric_scale(self) -> Scale:
        """Return what makes the metric of its values."""
        kept = self.scale
        return kept_scale(dict(self.metric), kept.factor, exponential=kept.exponential)


def entry_of(side: Side, label: str) -> Entry:
    """Describe a run as a line of a history.

    Raises:
        DataError: it has no metric, so there is nothing to keep.
    """
    samples, metric, report = side.samples, side.metric, side.run.report
    if samples is None or metric is None:
        raise DataError(
            f"run {side.run.path!r}",
            f"has no metric to keep in a history ({side.metric_reason})",
            "give the spec data.evaluation, or leave out --history",
        )
    times = side.entry["latency_ms"]
    kept = report["per_sample"]
    return Entry(
        schema=1,
        name=report["name"],
        artifact=side.name,
        label=label,
        version=report["environment"]["versions"]["compressor"],
        model=report["identity"]["model"],
        data=report["identity"]["data"],
        spec=report["identity"]["spec"],
        sha256=side.entry.get("sha256"),
        metric=MetricForm(**metric),
        metric_code=report["identity"]["metric_code"],
        scale=ScaleForm(factor=kept["factor"], exponential=kept["exponential"]),
        bytes=side.bytes,
        latency_ms=None if times is None else times["p50"],
        samples=_text(samples),
    )


def read_history(path: Path) -> list[Entry]:
    """Read a history, the oldest run first; a missing file has none.

    Raises:
        InputError: a line is not that of a run.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise InputError(
            f"history {str(path)!r}", f"cannot be read ({error})", "name a file of --history"
        ) from error
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            entries.append(_entry(line, f"{path}:{number}"))
            counts = [entry.metric.samples for entry in (entries[0], entries[-1])]
            if counts[0] != counts[1]:
                problem = f"has {counts[1]} samples, the first run {counts[0]}"
                raise InputError(f"history {path}:{number}", problem, _REMEDY)
    return entries


def check_fits(
    entries: Sequence[Entry], new: Entry, path: Path, allowed: Collection[Allowed]
) -> None:
    """Refuse a run that does not belong to a history.

    Args:
        allowed: in what it may differ from the runs before.

    Raises:
        SpecError: it says everything that differs.
    """
    if not entries:
        return
    last = entries[-1]
    ours, theirs = (direction(entry.metric.higher_is_better) for entry in (last, new))
    compared: list[tuple[str, str, str | None, str]] = [
        ("name", last.name, new.name, "keep one history for each spec"),
        ("artifact", last.artifact, new.artifact, "keep one history for each artifact"),
        ("metric", last.metric.name, new.metric.name, "begin another file"),
        ("direction of the metric", ours, theirs, "begin another file"),
        ("evaluation data", last.data, new.data, "begin another file: samples no longer pair"),
    ]
    if last.metric_code is not None:
        compared.append(
            ("code of the metric", last.metric_code, new.metric_code, "begin another file")
        )
    if "model" not in allowed:
        compared.append(
            ("float model", last.model, new.model, "begin another file, or --allow model")
        )
    wrong = [
        SpecError(
            f"history {str(path)!r}",
            f"has another {what} than this run ({short(ours)} against {short(theirs)})",
            remedy,
        )
        for what, ours, theirs, remedy in compared
        if ours != theirs
    ]
    if wrong:
        raise SpecErrors(wrong)


def append(path: Path, entries: Sequence[Entry], new: Entry) -> list[Entry]:
    """Add a run to a history, and return all; the same run twice in a row is one entry.

    Raises:
        SpecError: the file cannot be written.
        InputError: the disk is full; the file is as it was.
    """
    if entries and entries[-1] == new:
        return list(entries)
    line = json.dumps(new.model_dump(by_alias=True), ensure_ascii=False, allow_nan=False) + "\n"
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _append_whole(path, line.encode())
    return [*entries, new]


def _append_whole(path: Path, line: bytes) -> None:
    """Add a line in one write, so that two processes' lines do not mix; all of it or nothing."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            written = os.write(handle, line)
            if written < len(line):
                os.write(handle, line[written:])
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def _text(samples: Array) -> str:
    if np.isin(samples, (0.0, 1.0)).all():
        return "b" + _packed(np.packbits(samples.astype(np.uint8)).tobytes())
    return "f" + _packed(samples.astype("<f4").tobytes())


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def _entry(line: str, where: str) -> Entry:
    subject, problem = f"history {where}", "is not a line that a run wrote"
    try:
        value = strict_json(line.encode(), subject, problem)
        check_form(Entry, value, subject, problem)
        entry = Entry(**value)
        entry.per_sample()
    except ModelError as error:
        raise InputError(subject, error.problem, _REMEDY) from error
    except ValueError as error:
        raise InputError(subject, f"{problem} ({error})", _REMEDY) from error
    return entry
