"""The data of a file's tensors: where they lie, and whether they are as long as shapes need."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import onnx
import onnx_ir as ir
from onnx import TensorProto

from compressor.errors import ModelError
from compressor.graph.messages import tensors_in

_LONGEST_NAME = 255  # bytes, in the file systems of Linux
_PAIRS = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)  # two entries an element


def data_folder(proto: onnx.ModelProto, path: Path) -> Path:
    """Return the folder that holds external data: the model's.

    Where the model is a link and links lead to its data, as in Hugging Face's cache, it is the
    folder that the model's link names, and the message gets the names that the data have there.
    """
    folder, named = path.parent, path.resolve().parent
    if named == folder.resolve():
        return folder
    external = (t for t in tensors_in(proto) if t.data_location == TensorProto.EXTERNAL)
    entries = [e for t in external for e in t.external_data if e.key == "location"]
    files = [(folder / str(e.value).replace("\0", "")).resolve() for e in entries]
    if not all(file.is_relative_to(named) for file in files):
        return folder
    for entry, file in zip(entries, files, strict=True):
        entry.value = str(file.relative_to(named))
    return named


def check_data(proto: onnx.ModelProto, folder: Path, subject: str) -> None:
    """Check that all tensors have the data that their shapes need, and none elsewhere.

    Args:
        folder: as :func:`data_folder` returns it.

    Raises:
        ModelError: data are missing, cut, of no known type, or outside of the folder.
    """
    for tensor in tensors_in(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            _check_external(tensor, folder, subject)
        else:
            _check_length(tensor, subject)


def _elements(tensor: TensorProto, subject: str) -> int:
    """Return the number of elements; refuse impossible types and shapes."""
    elements = 1
    for length in tensor.dims:
        elements *= length
        if length < 0:
            _refuse(tensor, subject, f"has a negative length in its shape {list(tensor.dims)}")
    types = {kind.value for kind in ir.DataType} - {TensorProto.UNDEFINED}
    if tensor.data_type not in types:
        _refuse(tensor, subject, f"has element type {tensor.data_type}, which is not known")
    return elements


def _bytes(tensor: TensorProto, elements: int) -> int:
    return -(-elements * ir.DataType(tensor.data_type).bitwidth // 8)


def _check_length(tensor: TensorProto, subject: str) -> None:
    """Check that a tensor stored in the file itself holds as much data as its shape needs."""
    elements = _elements(tensor, subject)
    if tensor.HasField("raw_data"):
        if tensor.data_type == TensorProto.STRING:
            _refuse(tensor, subject, "holds text as raw bytes")
        have, want = len(tensor.raw_data), _bytes(tensor, elements)
        unit = "bytes"
    else:
        # Types of less than a byte share an entry as they share a byte.
        text = tensor.data_type == TensorProto.STRING
        packed = 1 if text else max(1, 8 // ir.DataType(tensor.data_type).bitwidth)
        each = 2 if tensor.data_type in _PAIRS else 1
        have = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
        want, unit = -(-elements * each // packed), "values"
    if have != want:
        shape = list(tensor.dims)
        _refuse(tensor, subject, f"holds {have} {unit}, but its shape {shape} needs {want}")


def _check_external(tensor: TensorProto, folder: Path, subject: str) -> None:
    """Check that external data lies beside the model and is complete."""
    # What is not UTF-8 comes as bytes.
    places = {str(entry.key): str(entry.value) for entry in tensor.external_data}
    location = places.get("location", "")
    root = folder.resolve()
    if "\0" in location or not location:
        _refuse(tensor, subject, f"names no valid file for its data, {location!r}")
    if tensor.data_type == TensorProto.STRING:
        _refuse(tensor, subject, "holds text in another file")
    file = folder / location
    if len(Path(location).name.encode()) > _LONGEST_NAME:
        _refuse(tensor, subject, f"names no valid file for its data, {location[:_LONGEST_NAME]!r}")
    if not file.resolve().is_relative_to(root):
        raise ModelError(
            subject,
            f"keeps {tensor.name!r} outside its folder, at {location!r}",
            "keep external data beside the model, as files and not as links",
        )
    offset, length = (_number(tensor, places, key, subject) for key in ("offset", "length"))
    want = _bytes(tensor, _elements(tensor, subject))
    if length is not None and length != want:
        shape = list(tensor.dims)
        _refuse(tensor, subject, f"has {length} bytes, but its shape {shape} needs {want}")
    if not file.is_file() or file.stat().st_size < (offset or 0) + want:
        raise ModelError(
            subject,
            f"external data file {location!r} is missing or too short",
            "copy it beside the model again",
        )


def _number(tensor: TensorProto, places: dict[str, str], key: str, subject: str) -> int | None:
    text = places.get(key)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        _refuse(tensor, subject, f"has the {key} {text!r} in its external data")
    return int(text)


def _refuse(tensor: TensorProto, subject: str, problem: str) -> NoReturn:
    raise ModelError(
        subject,
        f"tensor {tensor.name!r} {problem}",
        "the file is damaged or was edited; export it again",
    )
