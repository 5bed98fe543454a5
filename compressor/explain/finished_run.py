"""Find what a run left: its report, its manifest, and the spec if that was named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import ModelError, SpecError
from compressor.inspection.run_output import MANIFEST, REPORT, read_mapping
from compressor.spec.load import Spec, load_spec

_SCHEMA = 1
_SPECS = (".yaml", ".yml")
_AGAIN = "run the spec again with this version; finished passes are not done again"


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end.

    Attributes:
        folder: its output.
        report: the content of ``report.json``.
        manifest: the content of ``manifest.json``.
        spec: the spec, where that was named in place of the folder.
    """

    folder: Path
    report: Mapping[str, Any]
    manifest: Mapping[str, Any]
    spec: Spec | None


def finished_run(path: Path, settings: Sequence[str] = ()) -> FinishedRun:
    """Open a run by its output folder, its ``report.json``, or its spec.

    Args:
        path: any of these.
        settings: overrides, where it is a spec.

    Raises:
        SpecError: there is nothing, or no run made it.
        ModelError: a file is damaged, or of another version.
    """
    spec = None
    if path.suffix in _SPECS:
        spec = load_spec(path, settings)
    elif settings:
        raise SpecError("--set", "changes a spec, and a run is named", "name the spec")
    folder = spec.output if spec else path if path.is_dir() else path.parent
    subject = f"run {str(spec.output if spec else path)!r}"
    if not (spec or path.exists()):
        raise SpecError(subject, "does not exist", "name the output folder of a run, or its spec")
    if not path.is_dir() and spec is None and path.name != REPORT:
        raise SpecError(
            f"file {str(path)!r}",
            "is no report",
            "name the output folder of a run, its report.json, or its spec",
        )
    for name in (REPORT, MANIFEST):
        if not (folder / name).is_file():
            remedy = f"compress run {path} first" if spec else "name the output folder of a run"
            raise SpecError(subject, f"has no {name}", remedy)
    report, manifest = read_mapping(folder / REPORT), read_mapping(folder / MANIFEST)
    _check(subject, report, manifest)
    if spec is not None and manifest["spec"] != json.loads(json.dumps(spec.resolved)):
        raise SpecError(
            f"spec {str(path)!r}", "has changed since it was run", f"compress run {path} first"
        )
    return FinishedRun(folder, report, manifest, spec)


def _check(subject: str, report: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    schema = report.get("schema")
    if schema != _SCHEMA:
        raise ModelError(
            subject, f"has a report of schema {schema}, and this version reads {_SCHEMA}", _AGAIN
        )
    passes = report.get("passes")
    known = isinstance(passes, list) and isinstance(manifest.get("spec"), dict)
    if not known or any(not isinstance(p, dict) or "attribution" not in p for p in passes or ()):
        raise ModelError(subject, "was made by a version that did not attribute noise", _AGAIN)
