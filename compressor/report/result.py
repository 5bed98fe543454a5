"""A finished run as a value."""

from __future__ import annotations

import copy as copies
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from compressor.errors import ExitCode, ModelError, SpecError, suggestion
from compressor.files import (
    STAGING,
    SWITCH,
    copy,
    disk_errors,
    file_sha256,
    is_file_name,
    read_json,
    switch,
)
from compressor.lab.verify.manifests import MANIFEST
from compressor.models.codec.load import load
from compressor.report.html import first_screen
from compressor.report.terminal import plain_text, run_page
from compressor.report.verdict import artifact_verdict, headline, main_artifact
from compressor.run.verdicts.verdicts import Verdict
from compressor.types.arguments import check_arguments

_HIGH = 620  # pixels of the frame in a notebook
_OPENED = ("safetensors", "onnx", "archive")  # formats that PyTorch can run, the best first


@dataclass(frozen=True)
class Artifact:
    """One exported file of a run, as it was measured.

    Attributes:
        format: the exporter's name, such as ``onnx``.
        path: the main file, in the run's folder.
        bytes: size of all its files.
        sha256: of the main file.
        metric: the metric on the evaluation data, in its unit; ``None`` if not measured.
        metric_drop: the drop from the float model; positive is worse.
        size_ratio: bytes over the float model's.
        latency_ratio: latency over the float model's, timed side by side.
        verdict: by the run's limits and checks.
    """

    format: str
    path: Path
    bytes: int
    sha256: str
    metric: float | None
    metric_drop: float | None
    size_ratio: float
    latency_ratio: float | None
    verdict: Verdict


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run: what it measured, and where its files are.

    A notebook shows the first screen of the report; ``print`` shows the table that ``compress run``
    prints.

    Example:
        >>> result = compressor.run("spec.yaml")
        >>> result.verdict, result.artifacts[0].metric_drop
        ('passed', 0.0)

    Attributes:
        report: the content of ``report.json``.
        output: the folder with the artifacts, the reports and the manifest.
        exit_code: the exit code of ``compress run``: 0; 1 if a limit failed or, in a strict run,
            is unknown; 4 if an artifact failed its check.
        cached: whether nothing had changed, so that all results are from an earlier run.
        kept: an object that keeps a temporary output folder alive.
    """

    report: Mapping[str, Any]
    output: Path
    exit_code: ExitCode
    cached: bool
    kept: object = field(default=None, compare=False)

    @property
    def verdict(self) -> Verdict:
        """``passed``, ``failed`` or ``unknown``."""
        verdict: Verdict = self.report["verdict"]
        return verdict

    @property
    def ok(self) -> bool:
        """Whether nothing failed; an unknown verdict counts as ok."""
        return bool(self.report["ok"])

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The exported files, in the order of the spec."""
        return tuple(
            Artifact(
                format=str(entry["format"]),
                path=self.output / str(entry["path"]),
                bytes=int(entry["bytes"]),
                sha256=str(entry["sha256"]),
                metric=None if entry["metric"] is None else float(entry["metric"]["value"]),
                metric_drop=entry["metric_drop"],
                size_ratio=float(entry["size_ratio"]),
                latency_ratio=entry["latency_ratio"],
                verdict=artifact_verdict(self.report, entry),
            )
            for entry in self.report["artifacts"]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the content of ``report.json``."""
        return copies.deepcopy(dict(self.report))

    def load(self, artifact: str | None = None) -> torch.nn.Module:
        """Open an artifact as a module, as :func:`compressor.load` does.

        Args:
            artifact: its format or the name of its file; by default the first that can be opened.

        Raises:
            SpecError: there is no such artifact, or it cannot be run by PyTorch.
        """
        check_arguments(RunResult.load, locals())
        named = [a for a in self.artifacts if artifact in (None, a.format, a.path.name)]
        if artifact is not None and not named:
            names = [name for a in self.artifacts for name in (a.format, a.path.name)]
            raise SpecError(
                f"artifact {artifact!r}",
                "is not an artifact of this run",
                suggestion(artifact, names),
            )
        opened = sorted(
            (a for a in named if a.format in _OPENED), key=lambda a: _OPENED.index(a.format)
        )
        if not opened:
            raise SpecError(
                f"artifact {named[0].path.name!r}",
                "is not opened by PyTorch",
                f"add an export that is: {', '.join(_OPENED)}",
            )
        return load(opened[0].path)

    def save(self, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Copy the artifacts, the reports and the manifest into a folder, all together.

        Files of an earlier save or run that this one does not have are removed from it.

        Args:
            folder: a new one, an empty one, or that of an earlier save or run.
            force: also write into one that holds other files; files of the same names are replaced.

        Returns:
            The folder.

        Raises:
            SpecError: it is a file, or holds other files.
            InputError: the disk is full.
        """
        check_arguments(RunResult.save, locals())
        target = Path(folder).resolve()
        if target == self.output.resolve():
            return target
        check_free(target, force=force)
        names = [str(entry["name"]) for entry in self._manifest()["outputs"]]
        target.mkdir(parents=True, exist_ok=True)
        with switch(target) as (staged, gone):
            for name in (*names, MANIFEST):
                copy(self.output / name, staged / name)
            gone += stale_files(target, names)
        return target

    def _manifest(self) -> Any:
        path = self.output / MANIFEST
        return read_json(path, f"manifest {str(path)!r}", "cannot be read")

    def __repr__(self) -> str:
        name, entry = self.report["name"], main_artifact(self.report)
        file = "" if entry is None else f", {entry['path']}"
        return f"<{type(self).__name__} {name}: {headline(self.report)}{file}>"

    def __str__(self) -> str:
        folder = str(self.output) if self.kept is None else None  # gone with the program
        return plain_text(run_page(self.report, folder)).rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the report's first screen in a frame, so that its styles stay its own."""
        page = escape(first_screen(self.report), quote=True)
        return (
            f'<iframe title="Report of {escape(str(self.report["name"]), quote=True)}" '
            f'srcdoc="{page}" style="width:100%;height:{_HIGH}px;border:0"></iframe>'
        )


def check_free(folder: Path, *, force: bool) -> None:
    """Refuse a folder that holds files of others, unless ``force`` is set.

    Raises:
        SpecError: it does, is a file, or cannot be written.
    """
    subject = f"output {str(folder)!r}"
    with disk_errors(folder):
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        for name in folder.absolute().relative_to(place.absolute()).parts:
            with suppress(FileNotFoundError, NotADirectoryError):
                (place / name).lstat()  # tells of a name that is too long for its disk
    if folder.exists() and not folder.is_dir():
        raise SpecError(subject, "is a file", "name a folder")
    if not force and folder.is_dir() and _is_foreign(folder):
        raise SpecError(
            subject,
            "holds files that no run of compressor made",
            "name another folder, empty this one, or replace files of the same names with --force "
            "(force=True in Python)",
        )
    with disk_errors(folder), tempfile.TemporaryDirectory(prefix=STAGING, dir=place):
        pass  # there are places that tell only then that they take nothing


def _is_foreign(folder: Path) -> bool:
    """Return whether a folder holds files, and no run has published any there."""
    if (folder / SWITCH).is_dir():  # a killed process has begun to
        return False
    if all(path.name.startswith(STAGING) for path in folder.iterdir()):
        return False
    try:
        entry = read_json(folder / MANIFEST, "", "")
    except ModelError:
        return True
    return not (isinstance(entry, dict) and {"outputs", "spec", "seal"} <= entry.keys())


def stale_files(folder: Path, kept: Sequence[str]) -> list[str]:
    """Return the files that an earlier run left in a folder as they are, and this one does not."""
    try:
        old = read_json(folder / MANIFEST, "", "")
        written = {str(entry["name"]): str(entry["sha256"]) for entry in old["outputs"]}
    except (ModelError, KeyError, TypeError):  # none, or not ours: nothing to remove
        return []
    gone = {name: digest for name, digest in written.items() if name not in kept}
    return [
        name
        for name, digest in gone.items()
        if is_file_name(name) and (folder / name).is_file() and file_sha256(folder / name) == digest
    ]
