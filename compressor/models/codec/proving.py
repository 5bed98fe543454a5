"""Prove that weights are those that ``model.json`` was written with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from compressor.errors import ModelError
from compressor.files import file_sha256, is_file_name
from compressor.models.codec.forms import DIGEST
from compressor.models.codec.headers import read_header
from compressor.models.codec.reading import Description
from compressor.types.proofs import NO_HASH, checksum

_LENGTH = 8
_BLOCK = 1 << 20


def file_hashes(description: Description) -> Mapping[str, str]:
    """Return the hashes that ``model.json`` notes of the files beside it, by their names.

    Raises:
        ModelError: there is none of the weights, or one of a file elsewhere.
    """
    for name, noted in description.files.items():
        if not isinstance(noted, str) or not is_file_name(name):
            problem = f"notes a hash of {name!r}, which is no file beside it"
            raise ModelError(description.subject, problem, "export the model again")
    if description.weights not in description.files:
        raise ModelError(
            description.subject,
            f"holds no hash of {description.weights!r}: an earlier version wrote it",
            "export the model again with this version",
        )
    return description.files


def noted_description(path: Path) -> str:
    """Return the hash of ``model.json`` that a file of weights notes; empty where it has none."""
    try:
        return read_header(path).metadata.get(DIGEST, "")
    except ModelError:
        return ""


def written_hash(path: Path) -> str:
    """Return the hash of a file beside ``model.json`` as that notes it.

    Of weights: that of the data, then of the header with zeros for the hash of ``model.json``.
    """
    if path.suffix == ".json":
        return file_sha256(path)
    whole = hashlib.sha256()
    with path.open("rb") as stream:
        size = path.stat().st_size
        length = min(int.from_bytes(stream.read(_LENGTH), "little"), size)
        stream.seek(0)
        header = stream.read(_LENGTH + length)
        while block := stream.read(_BLOCK):
            whole.update(block)
    noted = noted_description(path).encode()
    whole.update(header.replace(noted, NO_HASH.encode(), 1) if len(noted) == 64 else header)
    return whole.hexdigest()


def changed_tensors(description: Description, path: Path) -> tuple[str, ...]:
    """Return the tensors in a file of weights whose bytes have another checksum.

    Raises:
        ModelError: its header is damaged.
    """
    header = read_header(path)
    expected = {
        name: (tuple(entry.parts(name)), entry.checksum)
        for name, entry in description.tensors.items()
        if entry.checksum and name in header.tensors
    }
    with path.open("rb") as stream:
        changed = []
        for name, (parts, was) in expected.items():
            blocks = []
            for part in parts:
                if part not in header.tensors:
                    break
                stream.seek(header.tensors[part].offset)
                blocks.append(stream.read(header.tensors[part].nbytes))
            if checksum(blocks) != was:
                changed.append(name)
    return tuple(changed)


def stored_checksums(path: Path) -> Mapping[str, str]:
    """Return the checksum of each tensor in a safetensors file.

    Raises:
        ModelError: its header is damaged.
    """
    sums = {}
    with path.open("rb") as stream:
        for tensor in read_header(path).tensors.values():
            stream.seek(tensor.offset)
            sums[tensor.name] = checksum([stream.read(tensor.nbytes)])
    return sums
