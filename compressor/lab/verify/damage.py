"""Find out what is damaged in a file that is not as it was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from compressor.errors import CompressorError, ModelError, listed
from compressor.lab.verify.files import FileState
from compressor.models.codec.forms import DESCRIPTION
from compressor.models.codec.load import packed_format
from compressor.models.codec.proving import changed_tensors, stored_checksums
from compressor.models.codec.reading import read_description
from compressor.models.onnx.checksums import onnx_checksums
from compressor.types.exporter import PackedFormat
from compressor.types.proofs import ExpectedFile

_SAFETENSORS, _ONNX, _DATA = ".safetensors", ".onnx", ".data"
_SAME = "what is packed in it is as it was"
_NO_TENSOR = "no tensor: what describes them was changed"


def explained(
    folder: Path, states: Iterable[FileState], expected: Iterable[ExpectedFile]
) -> tuple[FileState, ...]:
    """Name the tensors that are damaged in files that were changed."""
    tensors = {file.name: file.tensors for file in expected}
    return tuple(
        damage(folder, state, tensors.get(state.name, {})) if state.state == "changed" else state
        for state in states
    )


def damage(folder: Path, state: FileState, tensors: Mapping[str, str]) -> FileState:
    """Name the tensors that are damaged in a file.

    Args:
        tensors: their checksums, where they are noted outside of the model's own files.
    """
    path = folder / state.name
    try:
        packed = packed_format(path)
        if packed is not None:
            inside = archive_damage(state, packed, path)
            return inside if inside.detail else replace(state, detail=_SAME)
        if not tensors and path.suffix == _SAFETENSORS and (folder / DESCRIPTION).is_file():
            changed = changed_tensors(read_description(folder / DESCRIPTION), path)
        elif not tensors:
            return state
        else:
            sums = _checksums(path)
            changed = tuple(name for name, was in tensors.items() if sums.get(name) != was)
    except CompressorError as error:
        return replace(state, detail=f"{error.subject}: {error.problem}")
    except OSError as error:
        return replace(state, detail=f"cannot be read ({error.strerror})")
    if not changed:
        return replace(state, detail=_NO_TENSOR)
    kind = "tensor" if len(changed) == 1 else "tensors"
    return replace(state, detail=f"{kind} {listed(changed)}", tensors=changed)


def archive_damage(state: FileState, packed: PackedFormat, path: Path) -> FileState:
    """Decode all of an archive, which the hashes in it prove; name what is damaged.

    Raises:
        InputError: there is no room to decode it.
    """
    try:
        with packed.unpacked(path):
            return state
    except ModelError as error:
        detail = f"{error.subject}: {error.problem}"
        tensors = packed.damaged_tensors(path)
        return replace(state, state="changed", detail=detail, tensors=tensors)


def _checksums(path: Path) -> Mapping[str, str]:
    if path.suffix == _SAFETENSORS:
        return stored_checksums(path)
    graph = path if path.suffix == _ONNX else path.with_name(path.name.removesuffix(_DATA))
    return onnx_checksums(graph).get(path.name, {})
