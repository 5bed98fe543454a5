"""Write the exports, each in a staging folder first, then moved into place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError
from compressor.files import publish, staging
from compressor.hashing import file_sha256, json_sha256
from compressor.run.workspace import Workspace
from compressor.store import result_key
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext, Exporter


@dataclass(frozen=True)
class Artifact:
    """One exported artifact in the output folder.

    Attributes:
        exporter: what wrote it and can open it.
        path: the main file.
        files: name, bytes and sha256 of every file, the main one first.
        predicted: the bytes that the plan predicted.
    """

    exporter: Exporter
    path: Path
    files: Sequence[Mapping[str, Any]]
    predicted: int

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(int(f["bytes"]) for f in self.files)

    @property
    def digest(self) -> str:
        """Hash of all files."""
        return json_sha256([[f["name"], f["sha256"]] for f in self.files])


def write_artifacts(workspace: Workspace, key: str, carrier: Carrier) -> list[Artifact]:
    """Export the model with this key, except where the files are there already.

    Raises:
        CompressorError: an exporter fails; nothing of its artifact is left behind.
    """
    spec = workspace.plan.spec
    context = ExportContext(spec.name, json_sha256(_what_decides(spec.resolved)))
    made = []
    for index, (exporter, planned) in enumerate(
        zip(spec.exports, workspace.plan.exports, strict=True)
    ):
        own = result_key(
            "export",
            key,
            format=exporter.format,
            version=exporter.version,
            options=exporter.model_dump(mode="json"),
            name=context.name,
            spec=context.spec_digest,
        )
        try:
            files = _written(workspace, own, exporter, carrier, context)
        except CompressorError as error:
            raise error.at(spec.where("exports", index)) from error.__cause__
        path = spec.output / str(files[0]["name"])
        made.append(Artifact(exporter, path, files, planned.bytes))
    return made


def _what_decides(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of a spec what does not change the artifacts' content."""
    return {k: v for k, v in resolved.items() if k not in ("output", "limits", "exports")}


def _written(
    workspace: Workspace, key: str, exporter: Exporter, carrier: Carrier, context: ExportContext
) -> Sequence[Mapping[str, Any]]:
    output = workspace.plan.spec.output
    found = workspace.store.read(key)
    if found is not None and _intact(output, found["files"]):
        files: Sequence[Mapping[str, Any]] = found["files"]
        return files
    workspace.load()
    with (
        workspace.progress.stage(f"export {exporter.format}"),
        staging(output) as folder,
    ):
        paths = exporter.write(carrier, folder, context)
        files = [
            {
                "name": p.relative_to(folder).as_posix(),
                "bytes": p.stat().st_size,
                "sha256": file_sha256(p),
            }
            for p in paths
        ]
        for staged in reversed(paths):  # the main file last: it refers to the others
            publish(staged, output / staged.relative_to(folder))
    with workspace.store.write(key) as (_, result):
        result["files"] = files
    return files


def _intact(output: Path, files: Sequence[Mapping[str, Any]]) -> bool:
    return all(
        (output / f["name"]).is_file() and file_sha256(output / f["name"]) == f["sha256"]
        for f in files
    )
