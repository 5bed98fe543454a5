"""``model.json``, read and written: a compressed model's graph, and how its tensors are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir

from compressor.errors import ModelError
from compressor.graph.skeleton import Skeleton, graph_as_json, graph_from_json
from compressor.graph.values import INTEGER_CODES, tensor_spec
from compressor.models.codec.forms import STORED, Bitmask, Bits, Entry, Form, NOfM
from compressor.models.codec.sparse import GROUP

DESCRIPTION = "model.json"
FORMAT = "compressor"
SCHEMA = 1

_BY_NAME = {dtype.numpy().name: dtype for dtype in STORED}
_SPARSE = frozenset(STORED) - {d for d in STORED if d.bitwidth < 8} - {ir.DataType.BOOL}
_EDITED = "it was edited or damaged; export the model again"


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
    """

    subject: str
    digest: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graph: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    weights: str

    def model(self) -> ir.Model:
        """Return the graph; its initializers have no data.

        Raises:
            ModelError: it is no graph, or has other tensors than are listed.
        """
        model = graph_from_json(self.graph, self.subject)
        initializers = model.graph.initializers
        for name in initializers.keys() ^ self.tensors.keys():
            _fail(self.subject, f"has {name!r} in its graph or its list of tensors, not in both")
        for name, entry in self.tensors.items():
            value = initializers[name].const_value
            if value is None or value.dtype != entry.dtype or value.shape.numpy() != entry.shape:
                _fail(self.subject, f"describes {name!r} differently in its graph")
        return model


def read_description(path: Path) -> Description:
    """Read and check the file, except for the graph.

    Raises:
        ModelError: it is missing, damaged, of another schema or of an unknown form.
    """
    subject = f"model {str(path)!r}"
    if not path.is_file():
        raise ModelError(
            subject, "does not exist", "give a directory that a safetensors export wrote"
        )
    try:
        text = path.read_bytes()
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
    if not isinstance(weights, str) or Path(weights).name != weights:
        _fail(subject, f"names the weights {weights!r}, which is not a file beside it")
    entries = {name: _entry(name, value, subject) for name, value in tensors.items()}
    _check_names(entries, subject)
    digest = hashlib.sha256(text).hexdigest()
    inputs, outputs = (_names(document.get(key)) for key in ("inputs", "outputs"))
    return Description(subject, digest, inputs, outputs, graph, entries, weights)


def _names(value: Any) -> tuple[str, ...]:
    """Return the names in a list of inputs or outputs; empty where it is malformed."""
    specs = value if isinstance(value, list) else []
    return tuple(str(spec.get("name")) for spec in specs if isinstance(spec, dict))


def description_text(
    model: ir.Model, parts: Skeleton, entries: Mapping[str, Entry], weights: str
) -> bytes:
    """Return the file's content.

    Args:
        model: the graph as it is; its inputs and outputs are described.
        parts: the graph that is stored.
        entries: how its tensors are stored, by name.
        weights: the file with the tensors, or the index of several.
    """
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "inputs": [_spec(value) for value in model.graph.inputs],
        "outputs": [_spec(value) for value in model.graph.outputs],
        "weights": weights,
        "tensors": {name: _entry_json(entries[name]) for name in parts.tensors},
        "graph": graph_as_json(parts.proto),
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    return text.encode() + b"\n"


def _spec(value: ir.Value) -> dict[str, Any]:
    spec = tensor_spec(value)
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _entry_json(entry: Entry) -> dict[str, Any]:
    fields: dict[str, Any] = {"dtype": entry.dtype.numpy().name, "shape": list(entry.shape)}
    match entry.form:
        case Bits(width):
            fields |= {"form": "bits", "bits": width}
        case Bitmask(mask):
            fields |= {"form": "bitmask", "mask": mask}
        case NOfM(n, axis, indices):
            fields |= {"form": "n-of-m", "n": n, "m": GROUP, "axis": axis, "indices": indices}
        case None if entry.packed > 1:
            fields["packed"] = entry.packed
    return fields


def _entry(name: str, value: Any, subject: str) -> Entry:
    """Invert :func:`_entry_json`."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape = _BY_NAME.get(str(fields.get("dtype"))), fields.get("shape")
    if dtype is None or not isinstance(shape, list):
        _fail(subject, f"does not say the dtype and shape of {name!r}")
    if not all(type(length) is int and length >= 0 for length in shape):
        _fail(subject, f"gives {name!r} the shape {shape!r}")
    if "form" not in fields:
        entry = Entry(dtype, tuple(shape))
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
    return Entry(dtype, tuple(shape), form)


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
