"""Prove an artifact byte for byte, by what was noted when it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError, InputError
from compressor.lab.verify.damage import archive_damage, damage, explained
from compressor.lab.verify.files import FileState, compare, files_in, new_files, settled_folder
from compressor.lab.verify.manifests import (
    ENGINE_MANIFESTS,
    MANIFEST,
    REPORT,
    engine_files,
    is_engine,
    read_engine_manifest,
    read_manifest,
)
from compressor.lab.verify.signing import (
    check_signature,
    signature_names,
    with_signatures,
    write_signature,
)
from compressor.models.codec.forms import DESCRIPTION
from compressor.models.codec.headers import INDEX
from compressor.models.codec.load import packed_format
from compressor.models.codec.proving import file_hashes, noted_description, written_hash
from compressor.models.codec.reading import read_description
from compressor.progress import SILENT, Progress
from compressor.types.exporter import PackedFormat
from compressor.types.proofs import ExpectedFile

_WEIGHTS = ".safetensors"
_OPENVINO = (".xml", ".bin")  # a graph and its weights, which have one name


@dataclass(frozen=True)
class Proof:
    """What a verification found.

    Attributes:
        kind: what was verified.
        by: what says how its bytes must be.
        files: every file, compared.
        key: the fingerprint of the key that signed it; ``None`` without a signature.
    """

    path: str
    kind: str
    by: str
    files: tuple[FileState, ...]
    key: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return all(file.state == "unchanged" for file in self.files)

    def as_json(self) -> dict[str, Any]:
        """Return the document."""
        return {"ok": self.ok, **asdict(self)}


def verify(path: Path, key: Path | None = None, progress: Progress = SILENT) -> Proof:
    """Compare an artifact, or a folder of them, with what was noted when it was written.

    Args:
        path: the output folder of a run, or an artifact.
        key: a public key, in PEM; what is compared with is then the list that it has signed.

    Raises:
        SpecError: there is nothing, or the key is not a public key.
        InputError: nothing says how the bytes must be.
        ModelError: what says so is damaged, or was signed by another key.
    """
    folder = settled_folder(path)
    if key is not None:
        return _signed(path, folder, key, progress)
    if path.is_dir() or path.name in (MANIFEST, REPORT):
        return _folder(folder, path, progress)
    return _file(path, progress)


def sign(path: Path, key: Path, progress: Progress = SILENT) -> Proof:
    """Verify an artifact, or a folder of them, and sign the hashes of all its files.

    Args:
        key: a private key, in PEM.

    Raises:
        SpecError: the key is not a private key, or a file cannot be signed.
        InputError: see :func:`verify`.
    """
    proof = verify(path, progress=progress)
    if not proof.ok:
        return proof
    folder = path if path.is_dir() else path.parent
    names = files_in(folder) if path.is_dir() else (file.name for file in proof.files)
    fingerprint = write_signature(path, names, key)
    return Proof(proof.path, proof.kind, proof.by, proof.files, fingerprint)


def _signed(path: Path, folder: Path, key: Path, progress: Progress) -> Proof:
    expected, fingerprint = check_signature(path, key)
    tensors = _noted_tensors(folder)
    expected = tuple(ExpectedFile(f.name, f.sha256, tensors.get(f.name, {})) for f in expected)
    states = explained(folder, compare(folder, expected, progress), expected)
    names = signature_names(path)
    if path.is_dir():
        states += new_files(folder, with_signatures(file.name for file in expected))
    return Proof(str(path), "signed files", names[1], states, fingerprint)


def _noted_tensors(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the checksums of tensors by file, as far as a manifest can be read."""
    try:
        return {file.name: file.tensors for file in read_manifest(folder).files}
    except CompressorError:
        return {}


def _folder(folder: Path, path: Path, progress: Progress) -> Proof:
    if (folder / MANIFEST).is_file():
        expected = read_manifest(folder).files
        states = explained(folder, compare(folder, expected, progress), expected)
        known = with_signatures((MANIFEST, *(file.name for file in expected)))
        return Proof(str(path), "run output", MANIFEST, (*states, *new_files(folder, known)))
    if (folder / DESCRIPTION).is_file():
        return _pair(folder, path, progress)
    if (folder.parent / MANIFEST).is_file():
        inside = f"{folder.name}/"
        expected = tuple(f for f in read_manifest(folder.parent).files if f.name.startswith(inside))
        if expected:
            states = compare(folder.parent, expected, progress)
            listed = (f.name.removeprefix(inside) for f in expected)
            new = new_files(folder, with_signatures(listed))
            states += tuple(replace(state, name=inside + state.name) for state in new)
            return Proof(str(path), "artifact of a run", MANIFEST, states)
    engines = [p for suffix in ENGINE_MANIFESTS for p in sorted(folder.glob(f"*{suffix}"))]
    if len(engines) == 1:
        return _engine(engines[0], progress)
    raise _unknown(path)


def _unknown(path: Path) -> InputError:
    return InputError(
        f"path {str(path)!r}",
        "has nothing beside it that says how its bytes must be",
        f"copy {MANIFEST} from the run's output; or pass --key if it was signed",
    )


def _file(path: Path, progress: Progress) -> Proof:
    folder = path.parent
    if (folder / MANIFEST).is_file():
        expected = _of_artifact(read_manifest(folder).files, path.name)
        if expected:
            states = explained(folder, compare(folder, expected, progress), expected)
            return Proof(str(path), "artifact of a run", MANIFEST, states)
    packed = packed_format(path)
    if packed is not None:
        return _archive(path, packed)
    if path.name == DESCRIPTION or path.suffix == _WEIGHTS or path.name == INDEX:
        if (folder / DESCRIPTION).is_file():
            return _pair(folder, path, progress)
    elif is_engine(path):
        return _engine(path, progress)
    raise _unknown(path)


def _of_artifact(files: tuple[ExpectedFile, ...], name: str) -> tuple[ExpectedFile, ...]:
    """Return the files that make an artifact, from the name of one of them."""
    if not any(file.name == name for file in files):
        return ()
    if name in (DESCRIPTION, INDEX) or name.endswith(_WEIGHTS):
        pair = (DESCRIPTION, INDEX)
        return tuple(f for f in files if f.name in pair or f.name.endswith(_WEIGHTS))
    main = name.removesuffix(".json") if name.endswith(ENGINE_MANIFESTS) else name
    main = main.removesuffix(".data")
    if main.endswith(_OPENVINO):
        stem = main[: -len(".xml")]
        return tuple(f for f in files if f.name in {stem + suffix for suffix in _OPENVINO})
    return tuple(f for f in files if f.name == main or f.name.startswith(f"{main}."))


def _pair(folder: Path, path: Path, progress: Progress) -> Proof:
    """Compare weights with the ``model.json`` beside them, and that with their notes."""
    description = read_description(folder / DESCRIPTION)
    hashes = file_hashes(description)
    states = []
    with progress.stage("compare files", len(hashes)) as advance:
        for name, noted in hashes.items():
            states.append(_beside(folder, name, noted))
            advance(len(states))
    others = [
        name
        for name in hashes
        if name.endswith(_WEIGHTS)
        and (folder / name).is_file()
        and noted_description(folder / name) != description.digest
    ]
    size = (folder / DESCRIPTION).stat().st_size
    state = FileState(DESCRIPTION, "unchanged", size)
    if others:
        detail = f"{others[0]} was written with another one, or its header is damaged"
        state = FileState(DESCRIPTION, "changed", size, detail)
    return Proof(str(path), "compressed model", DESCRIPTION, (state, *states))


def _beside(folder: Path, name: str, noted: str) -> FileState:
    path = folder / name
    if not path.is_file():
        return FileState(name, "missing", None)
    size = path.stat().st_size
    if written_hash(path) == noted:
        return FileState(name, "unchanged", size)
    return damage(folder, FileState(name, "changed", size), {})


def _archive(path: Path, packed: PackedFormat) -> Proof:
    state = FileState(path.name, "unchanged", path.stat().st_size)
    states = (archive_damage(state, packed, path),)
    return Proof(str(path), "archive", "the hashes in it", states)


def _engine(path: Path, progress: Progress) -> Proof:
    engine, manifest = engine_files(path)
    content = read_engine_manifest(manifest)
    expected = (ExpectedFile(engine.name, str(content["engine"].get("sha256"))),)
    states = compare(engine.parent, expected, progress)
    state = FileState(manifest.name, "unchanged", manifest.stat().st_size)
    return Proof(str(path), "TensorRT engine", manifest.name, (*states, state))
