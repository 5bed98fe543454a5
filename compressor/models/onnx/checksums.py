"""Checksums of the tensors in an ONNX file and in the files beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from compressor.errors import ModelError
from compressor.files import is_file_name
from compressor.graph.messages import tensors_in
from compressor.types.proofs import checksum


def onnx_checksums(path: Path) -> dict[str, dict[str, str]]:
    """Return the checksum of each tensor, by the name of the file that holds its elements.

    A further tensor of the same name, such as one in another branch, gets a number after it.

    Raises:
        ModelError: it is not an ONNX file.
    """
    try:
        proto = onnx.ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        remedy = "the file is damaged; export it again"
        raise ModelError(f"model {str(path)!r}", "is not an ONNX file", remedy) from error
    sums: dict[str, dict[str, str]] = {}
    seen = Counter[str]()
    for tensor in tensors_in(proto):
        name = _text(tensor.name)
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}#{seen[name]}"
        if tensor.data_location != TensorProto.EXTERNAL:
            raw = tensor.HasField("raw_data")
            data = tensor.raw_data if raw else tensor.SerializeToString(deterministic=True)
            sums.setdefault(path.name, {})[name] = checksum([data])
            continue
        places = {_text(entry.key): _text(entry.value) for entry in tensor.external_data}
        sums.setdefault(places.get("location", ""), {})[name] = _outside(path.parent, places)
    return sums


def _text(value: str | bytes) -> str:
    """Return text; protobuf gives bytes where it is no UTF-8."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _outside(folder: Path, places: Mapping[str, str]) -> str:
    """Return the checksum of elements in another file; empty where they are not there."""
    location, start, length = (places.get(key, "") for key in ("location", "offset", "length"))
    if not is_file_name(location) or not length.isdigit():
        return ""
    try:
        with (folder / location).open("rb") as stream:
            stream.seek(int(start or 0))
            return checksum([stream.read(int(length))])
    except (OSError, ValueError, OverflowError):
        return ""
