"""``model.json``: the graph of a compressed model, and how its tensors are stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir

from compressor.errors import ModelError
from compressor.graph.skeleton import graph_from_json
from compressor.models.codec.forms import INTEGERS, STORED, Bitmask, Bits, Entry, Form, NOfM
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
        subject: what it is called in messages.
        digest: sha256 of the file.
        inputs: names of what the model takes; as it says beside the graph.
        outputs: names of what it returns.
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
            if value is None or value.dtype != entry.dtype or _shape(value) != entry.shape:
                _fail(self.subject, f"describes {name!r} differently in its graph")
        return model


def read_description(path: Path) -> Description:
    """Read and check the file, the graph apart.

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
    """Return the names in a list of inputs or outputs, as far as it is one."""
    specs = value if isinstance(value, list) else []
    return tuple(str(spec.get("name")) for spec in specs if isinstance(spec, dict))


def _entry(name: str, value: Any, subject: str) -> Entry:
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
        case {"form": "bits", "bits": int(bits)} if dtype in INTEGERS:
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
        part = entry.beside if entry.form is not None else None
        if part in taken:
            _fail(subject, f"stores {part!r} for {name!r} and for another tensor")
        if part is not None:
            taken.add(part)


def _shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(d) for d in tensor.shape.numpy())


def _fail(subject: str, problem: str) -> NoReturn:
    raise ModelError(subject, problem, _EDITED)
