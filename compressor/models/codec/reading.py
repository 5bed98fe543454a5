"""Read a compressed model: ``model.json``, and tensors mapped from the files beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir
from torch import Tensor

from compressor import __version__
from compressor.errors import ModelError
from compressor.files import check_json_size, is_file_name
from compressor.graph.skeleton import graph_from_json
from compressor.graph.values import INTEGER_CODES
from compressor.models.codec.forms import (
    CHECKSUM,
    DIGEST,
    FILES,
    FORMAT,
    SCHEMA,
    STORED,
    WRITER,
    Bitmask,
    Bits,
    Entry,
    Form,
    NOfM,
    Part,
)
from compressor.models.codec.headers import (
    ShardHeader,
    TensorHeader,
    check_index,
    read_header,
    read_index,
)
from compressor.models.codec.sparse import GROUP
from compressor.models.codec.stored_tensors import (
    DAMAGED,
    Stored,
    opened,
    stored_tensor,
    subject_of,
)

_BY_NAME = {dtype.numpy().name: dtype for dtype in STORED}
_SPARSE = frozenset(STORED) - {d for d in STORED if d.bitwidth < 8} - {ir.DataType.BOOL}
_EDITED = "it was edited or damaged; export the model again"
_OTHER = "it belongs to another model.json; export the model again"


@dataclass(frozen=True)
class Description:
    """The content of ``model.json``, checked.

    Attributes:
        digest: sha256 of the file.
        inputs: names of the model's inputs, as listed beside the graph.
        outputs: names of its outputs, likewise.
        graph: the graph, as :func:`compressor.graph.skeleton.graph_from_json` takes it.
        tensors: how each tensor is stored.
        weights: the file beside it with the tensors, or the index of several.
        files: hashes of the files beside it; empty where an earlier version wrote them.
    """

    subject: str
    digest: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    weights: str
    files: Mapping[str, str]

    def model(self) -> ir.Model:
        """Return the graph; its initializers have no data.

        Raises:
            ModelError: it is not a graph, or has other tensors than are listed.
        """
        model = graph_from_json(self.graph, self.subject)
        initializers = model.graph.initializers
        for name in initializers.keys() ^ self.tensors.keys():
            _fail(self.subject, f"has {name!r} in its graph or its list of tensors, not in both")
        for name, entry in self.tensors.items():
            value = initializers[name].const_value
            if value is None or value.dtype != entry.dtype or value.shape.numpy() != entry.shape:
                _fail(self.subject, f"describes {name!r} differently in its graph")
        for output in model.graph.outputs:
            given = output.is_graph_input() or output.is_initializer()
            if output.producer() is None and not given:
                _fail(self.subject, f"has the output {output.name!r}, which nothing computes")
        try:
            model.graph.sort()
        except ValueError:
            _fail(self.subject, "has nodes that form a cycle")
        return model


def read_description(path: Path) -> Description:
    """Read and check the file, except for the graph.

    Raises:
        ModelError: it is missing, damaged, of another schema or of an unknown form.
    """
    subject = f"model {str(path)!r}"
    if not path.is_file():
        raise ModelError(
            subject,
            "does not exist",
            "give a directory that holds it, or just one ONNX file or archive",
        )
    try:
        text = path.read_bytes()
        check_json_size(text)
        document = json.loads(text.decode("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(
            subject, f"is not JSON ({type(error).__name__}: {error})", _EDITED
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _fail(subject, f'is not a compressed model (no "format": "{FORMAT}")')
    if document.get("schema") != SCHEMA:
        raise ModelError(
            subject,
            f"has schema {document.get('schema')!r}, this version reads {SCHEMA}",
            "export the model again, or install the version that wrote it",
        )
    graph, tensors, weights = (document.get(k) for k in ("graph", "tensors", "weights"))
    if not isinstance(graph, dict) or not isinstance(tensors, dict):
        _fail(subject, "lacks its graph or its tensors")
    if not is_file_name(weights):
        _fail(subject, f"names the weights {weights!r}, which is not a file beside it")
    entries = {name: _entry(name, value, subject) for name, value in tensors.items()}
    _check_names(entries, subject)
    digest = hashlib.sha256(text).hexdigest()
    inputs, outputs = (_names(document.get(key)) for key in ("inputs", "outputs"))
    files = document.get(FILES, {})
    if not isinstance(files, dict):
        _fail(subject, "does not give the hashes of its files")
    return Description(subject, digest, inputs, outputs, graph, entries, weights, files)


def _names(value: Any) -> tuple[str, ...]:
    """Return the names in a list of inputs or outputs; empty where it is malformed."""
    specs = value if isinstance(value, list) else []
    return tuple(str(spec.get("name")) for spec in specs if isinstance(spec, dict))


def _entry(name: str, value: Any, subject: str) -> Entry:
    """Invert :meth:`Entry.as_json`."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape = _BY_NAME.get(str(fields.get("dtype"))), fields.get("shape")
    if dtype is None or not isinstance(shape, list):
        _fail(subject, f"does not say the dtype and shape of {name!r}")
    if not all(type(length) is int and length >= 0 for length in shape):
        _fail(subject, f"gives {name!r} the shape {shape!r}")
    summed = fields.get(CHECKSUM, "")
    if not isinstance(summed, str):
        _fail(subject, f"has an invalid checksum for {name!r}")
    if "form" not in fields:
        entry = Entry(dtype, tuple(shape), checksum=summed)
        if fields.get("packed", 1) != entry.packed:
            _fail(subject, f"packs {fields.get('packed')!r} elements of {name!r} in a byte")
        return entry
    form = _form(fields, dtype, tuple(shape))
    if form is None:
        raise ModelError(
            subject,
            f"stores {name!r}, {dtype.numpy().name}{shape}, in a form that this version does not "
            f"know ({fields['form']!r}) or that does not fit",
            "install the version that wrote it, or export the model again",
        )
    return Entry(dtype, tuple(shape), form, summed)


def _form(fields: Mapping[str, Any], dtype: ir.DataType, shape: tuple[int, ...]) -> Form | None:
    """Return how a tensor is stored; ``None`` where that is unknown or impossible."""
    match fields:
        case {"form": "bits", "bits": int(bits)} if dtype in INTEGER_CODES:
            return Bits(bits) if 1 <= bits < dtype.bitwidth else None
        case {"form": "bitmask", "mask": str(mask)} if dtype in _SPARSE:
            return Bitmask(mask)
        case {"form": "n-of-m", "n": 1 | 2 as n, "m": m, "axis": int(axis), "indices": str(name)}:
            fits = dtype in _SPARSE and m == GROUP and 0 <= axis < len(shape)
            return NOfM(int(n), axis, name) if fits and shape[axis] % GROUP == 0 else None
    return None


def _check_names(entries: Mapping[str, Entry], subject: str) -> None:
    """Check that no two tensors share what is stored of them."""
    taken = set(entries)
    for name, entry in entries.items():
        if isinstance(entry.form, Bitmask | NOfM):  # others are stored under their name alone
            part = entry.form.mask if isinstance(entry.form, Bitmask) else entry.form.indices
            if part in taken:
                _fail(subject, f"stores {part!r} for {name!r} and for another tensor")
            taken.add(part)


def _fail(subject: str, problem: str) -> NoReturn:
    raise ModelError(subject, problem, _EDITED)


def read_tensors(
    description: Description,
    headers: Sequence[ShardHeader],
    mapped: bool,
    *,
    verify: bool = True,
) -> dict[str, Tensor]:
    """Return the tensors of a model by name; if they are mapped, none of their bytes is read yet.

    Tensors that have to be decoded are lazy: they raise a ``ModelError`` when they are used and
    their parts contradict each other. So does any tensor whose bytes have another checksum.

    Args:
        headers: those of its files, see :func:`stored_headers`.
        mapped: map the files; otherwise read them now.
        verify: compare each tensor with its checksum when it is first used.

    Raises:
        ModelError: a file holds other tensors than are described, or cannot be read.
    """
    stored = _by_name(headers)
    _check(description, headers, stored)
    buffers = {header.path: opened(header, mapped) for header in headers}
    return {
        name: stored_tensor(name, entry if verify else replace(entry, checksum=""), buffers, stored)
        for name, entry in description.tensors.items()
    }


def written_with(description: Description, headers: Sequence[ShardHeader]) -> bool:
    """Return whether this version wrote these headers' files and that ``model.json`` together.

    If so, this version has compiled the graph in it before.
    """
    notes = [header.metadata for header in headers]
    same = all(note.get(DIGEST) == description.digest for note in notes)
    return same and all(note.get(WRITER) == __version__ for note in notes)


def stored_headers(description: Description, folder: Path) -> tuple[ShardHeader, ...]:
    """Read the headers of a model's files.

    Raises:
        ModelError: a file is missing or cut, or the index is not one, or a file was written with
            another ``model.json``.
    """
    headers = _headers(description, folder)
    for header in headers:
        if header.metadata.get(DIGEST, description.digest) != description.digest:
            problem = "were written with another model.json, or this one was edited"
            raise ModelError(subject_of(header), problem, "copy both files from one export")
    return headers


def _headers(description: Description, folder: Path) -> tuple[ShardHeader, ...]:
    path = folder / description.weights
    if not path.is_file():
        raise ModelError(
            f"weights {str(path)!r}", "do not exist", "copy the file beside model.json"
        )
    if path.suffix != ".json":
        return (_header(path),)
    index = read_index(path)
    for name in sorted(set(index.values())):
        if not is_file_name(name):
            problem = f"names the shard {name!r}, which is not beside it"
            raise ModelError(f"index {str(path)!r}", problem, _OTHER)
    headers = tuple(_header(folder / name) for name in sorted(set(index.values())))
    holders = {tensor: header.path.name for header in headers for tensor in header.tensors}
    check_index(path, index, holders, _OTHER)
    return headers


def _header(path: Path) -> ShardHeader:
    try:
        return read_header(path)
    except ModelError as error:
        raise ModelError(f"weights {str(path)!r}", error.problem, DAMAGED) from error


def _by_name(headers: Sequence[ShardHeader]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in stored:
                where = stored[name][0].path.name
                raise ModelError(subject_of(header), f"hold {name!r}, as {where!r} does", _OTHER)
            stored[name] = header, tensor
    return stored


def _check(
    description: Description, headers: Sequence[ShardHeader], stored: Mapping[str, Stored]
) -> None:
    """Check that the files hold what is described, and nothing else."""
    described = set()
    for name, entry in description.tensors.items():
        for part_name, part in entry.parts(name).items():
            described.add(part_name)
            if part_name not in stored:
                raise ModelError(subject_of(headers[0]), f"lack the tensor {part_name!r}", _OTHER)
            _check_part(part_name, part, *stored[part_name])
    extra = sorted(stored.keys() - described)
    if extra:
        header = stored[extra[0]][0]
        raise ModelError(
            subject_of(header), f"hold {extra[0]!r}, which the model does not have", _OTHER
        )


def _check_part(name: str, part: Part, header: ShardHeader, tensor: TensorHeader) -> None:
    fits = len(tensor.shape) == 1 if part.shape is None else tensor.shape == part.shape
    if tensor.dtype != part.dtype or not fits:
        expected = (
            f"one axis of {part.dtype}" if part.shape is None else f"{part.dtype}{list(part.shape)}"
        )
        raise ModelError(
            subject_of(header),
            f"hold {name!r} as {tensor.dtype}{list(tensor.shape)}, not {expected}",
            _OTHER,
        )
