"""Reopen a written ONNX model and compare it with what was meant to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NoReturn

import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
from onnx import TensorProto

from compressor.errors import ArtifactError
from compressor.graph.blocks import all_initializers

_REMEDY = "report it with the spec; the file is not to be used"

Described = tuple[int, tuple[int, ...]]
"""An element type and a shape."""


def described(proto: onnx.ModelProto) -> dict[str, Described]:
    """Return the type and shape of every initializer, those in branches too."""
    return {t.name: (t.data_type, tuple(t.dims)) for t in all_initializers(proto.graph)}


def check_message(proto: onnx.ModelProto) -> str | None:
    """Check a model without data with onnx's checker and strict shape inference.

    Returns:
        What is wrong, or ``None``.
    """
    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    for tensor in probe.graph.initializer:
        entry = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        probe.graph.input.append(entry)
    del probe.graph.initializer[:]
    return _checked(probe)


def check_file(path: Path, opset: int, expected: Mapping[str, Described]) -> None:
    """Check a written model.

    Raises:
        ArtifactError: the checker or shape inference refuses it, the opset is another, or an
            initializer is missing, unread, of another type, or not as long as it has to be.
    """
    subject = f"artifact {path.name!r}"
    wrong = _checked(path)
    if wrong is not None:
        _fail(subject, f"is refused by the onnx checker ({wrong})")
    model = onnx.load(path, load_external_data=False)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets.get("", opset) != opset:
        _fail(subject, f"has opset {opsets['']}, not {opset}")
    found = described(model)
    for name, meant in expected.items():
        if name not in found:
            _fail(subject, f"lacks the initializer {name!r}")
        if found[name] != meant:
            _fail(subject, f"holds {name!r} as {_text(found[name])}, not {_text(meant)}")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        _fail(subject, f"holds an initializer {extra[0]!r} that the model does not have")
    _check_use(model, subject)
    _check_lengths(model, path, subject)


def check_tensors(path: Path, expected: Mapping[str, ir.TensorProtocol]) -> str:
    """Read the initializers of a written model back and compare them, one at a time.

    Args:
        path: the model.
        expected: what it is to hold, by name.

    Returns:
        What was compared, in a few words.

    Raises:
        ArtifactError: one is missing or holds other values.
    """
    graph = ir.load(path).graph
    found = dict(graph.initializers)
    for inner in graph.subgraphs():
        found.update(inner.initializers)
    for name, meant in expected.items():
        tensor = found[name].const_value if name in found else None
        if tensor is None or tensor.tobytes() != meant.tobytes():
            _fail(f"artifact {path.name!r}", f"holds other values of {name!r}")
    return f"{len(expected)} tensors read back"


def _checked(model: Path | onnx.ModelProto) -> str | None:
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=True)
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
        RuntimeError,
        ValueError,
    ) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return " ".join(lines)[:400] if lines else type(error).__name__
    return None


def _check_use(model: onnx.ModelProto, subject: str) -> None:
    """Every weight is read by something, and none is quantized while the model runs.

    A float weight that lies beside its integer codes is read by nothing: that is how a quantized
    file comes out no smaller.
    """
    read = set(_names_read(model.graph))
    shapes = {t.name: len(t.dims) for t in all_initializers(model.graph)}
    for name in shapes:
        if name not in read:
            _fail(subject, f"holds {name!r}, which nothing reads")
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and shapes.get(node.input[0], 0) >= 2:
            _fail(subject, f"stores the weight {node.input[0]!r} as float and quantizes it later")


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    for output in graph.output:
        yield output.name
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _names_read(inner)


def _check_lengths(model: onnx.ModelProto, path: Path, subject: str) -> None:
    for tensor in all_initializers(model.graph):
        if tensor.data_type == TensorProto.STRING:
            continue
        want = _stored_bytes(tensor)
        places = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location != TensorProto.EXTERNAL:
            have = len(tensor.raw_data)
        else:
            file = path.parent / places["location"]
            end = int(places["offset"]) + int(places["length"])
            have = int(places["length"]) if file.stat().st_size >= end else 0
        if have != want:
            _fail(subject, f"stores {have} bytes of {tensor.name!r}, which has {want}")


def _stored_bytes(tensor: TensorProto) -> int:
    return -(-prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth // 8)


def _text(described: Described) -> str:
    return f"{TensorProto.DataType.Name(described[0]).lower()}{list(described[1])}"


def _fail(subject: str, problem: str) -> NoReturn:
    raise ArtifactError(subject, problem, _REMEDY)
