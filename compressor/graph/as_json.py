"""Codes that have fewer bits than the element type that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from compressor.errors import ModelError
from compressor.graph.codebooks import codebook_of
from compressor.graph.codes import BITS
from compressor.graph.values import INTEGER_CODES, all_nodes, is_op

if TYPE_CHECKING:
    from onnx_ir.passes import InPlacePass


def code_widths(model: ir.Model) -> dict[ir.Value, int]:
    """Return the bits of the codes, and of their zero points, that are stored in a wider type.

    The nodes that read them say so: ``DequantizeLinear`` by a note of the pass that made it, and
    places in a codebook by the length of that. No code is read.
    """
    widths: dict[ir.Value, int] = {}
    for node in all_nodes(model.graph):
        if is_op(node, "DequantizeLinear") and BITS in node.metadata_props:
            for value in (node.inputs[0], *node.inputs[2:]):
                if value is not None and value.is_initializer():
                    widths[value] = int(node.metadata_props[BITS])
    for value in model.graph.initializers.values():
        book = codebook_of(value) if value.dtype in INTEGER_CODES else None
        if book is not None:
            widths[value] = book.bits
    return {
        value: bits
        for value, bits in widths.items()
        if value.dtype in INTEGER_CODES and bits < value.dtype.bitwidth
    }


_PAIRS = {ir.DataType.INT4: ir.DataType.INT2, ir.DataType.UINT4: ir.DataType.UINT2}
_BITS = 2


def narrow(model: ir.Model) -> None:
    """Store 2-bit codes, which opset 21 has to hold in four bits, in two; in place.

    So those of one bit are, too. The result is for readers that do not mind the opset. No code is
    evaluated.
    """
    for codes in model.graph.initializers.values():
        book = codebook_of(codes) if codes.dtype in _PAIRS else None
        if book is not None and book.bits <= _BITS:
            _narrow(codes)
    for node in all_nodes(model.graph):
        if not is_op(node, "DequantizeLinear") or _bits(node) != _BITS:
            continue
        for value in (node.inputs[0], *node.inputs[2:]):
            if value is not None:
                _narrow(value)


def _narrow(value: ir.Value) -> None:
    if value.dtype in _PAIRS and value.const_value is not None:
        dtype, tensor = _PAIRS[value.dtype], value.const_value
        lazy = partial(_converted, tensor, dtype)
        value.const_value = ir.LazyTensor(lazy, dtype, _shape(tensor), name=value.name)
        value.type = ir.TensorType(dtype)  # copies of a graph share the type of a value


def _bits(node: ir.Node) -> int:
    return int(node.metadata_props.get(BITS, 0))


def _converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    values = np.asarray(tensor.numpy()).astype(np.int8).astype(dtype.numpy())
    return ir.Tensor(values, dtype=dtype)


def _shape(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape([int(d) for d in tensor.shape.numpy()])


_DEFAULT_DOMAINS = ("", "ai.onnx")
_SMALL = 16  # elements: longer constants become initializers, so that they are stored as weights


@dataclass(frozen=True)
class Skeleton:
    """A model in a canonical form, its weights apart.

    Attributes:
        proto: the model; its initializers, sorted by name, have a name, a type and a shape but no
            data. Equal graphs give equal messages.
        tensors: the initializers' values by name, in the same order; none was evaluated.
        widths: bits of the codes that have fewer than their element type, by name.
    """

    proto: onnx.ModelProto
    tensors: dict[str, ir.TensorProtocol]
    widths: dict[str, int]


def skeleton(model: ir.Model, *, narrowed: bool = False) -> Skeleton:
    """Take a model apart; it is not changed.

    Args:
        model: the model.
        narrowed: store codes in the narrowest element type, even if the opset lacks it.

    All initializers belong to the main graph. Notes, names of producers, and the shapes that
    inference finds again are left out; those of operators outside the ONNX standard are kept,
    because no inference finds them.

    Raises:
        ModelError: an initializer has no value.
    """
    plain = model.clone()
    if narrowed:
        narrow(plain)
    steps: list[InPlacePass] = [
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(size_limit=_SMALL),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.ClearMetadataAndDocStringPass(),
    ]
    if plain.functions:
        common.InlinePass()(plain)
    widths = code_widths(plain)  # before notes go
    for step in (*steps, common.RemoveUnusedOpsetsPass()):
        step(plain)
    tensors = _detach(plain.graph)
    proto = ir.to_proto(plain)
    for note in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        proto.ClearField(note)
    del proto.metadata_props[:]
    proto.graph.initializer.sort(key=lambda tensor: tensor.name)
    _tidy(proto.graph)
    proto.graph.name = proto.graph.name or "graph"
    return Skeleton(proto, tensors, {v.name: bits for v, bits in widths.items() if v.name})


def graph_as_json(proto: onnx.ModelProto) -> dict[str, Any]:
    """Return a skeleton's message in protobuf's JSON mapping."""
    document: dict[str, Any] = json_format.MessageToDict(proto)
    return document


def graph_from_json(document: Mapping[str, Any], subject: str) -> ir.Model:
    """Read what :func:`graph_as_json` wrote; the initializers have no data.

    Args:
        document: the JSON value.
        subject: what it is, for messages.

    Raises:
        ModelError: it is not an ONNX model.
    """
    try:
        proto = json_format.ParseDict(dict(document), onnx.ModelProto())
        _check_inside(proto.graph)
        model = ir.from_proto(proto)
    except (
        json_format.ParseError,
        DecodeError,
        ir.serde.SerdeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ModelError(
            subject,
            f"does not hold an ONNX graph ({reason})",
            "it was edited or damaged; export the model again",
        ) from error
    return model


def _check_inside(graph: onnx.GraphProto) -> None:
    """Raise ``ValueError`` where a constant would be read from a file that the graph names."""
    for node in graph.node:
        for attribute in node.attribute:
            if any(t.external_data for t in (attribute.t, *attribute.tensors)):
                raise ValueError(f"node {node.name!r} refers to a file")
            for inner in (attribute.g, *attribute.graphs):
                _check_inside(inner)


def _detach(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """Replace the values of all initializers with empty ones of the same type and shape."""
    tensors: dict[str, ir.TensorProtocol] = {}
    for name in sorted(graph.initializers):
        value = graph.initializers[name]
        tensor = value.const_value
        if tensor is None:
            raise ModelError(
                f"initializer {name!r}", "has no value", "check the file with onnx.checker"
            )
        tensors[name] = tensor
        empty = onnx.TensorProto(
            name=name, data_type=int(tensor.dtype), dims=[int(d) for d in tensor.shape.numpy()]
        )
        value.const_value = ir.TensorProtoTensor(empty)
    return tensors


def _tidy(graph: onnx.GraphProto) -> None:
    """Sort what has no order, and drop what says nothing new, in subgraphs too."""
    kept = {
        name for node in graph.node if node.domain not in _DEFAULT_DOMAINS for name in node.output
    }
    infos = sorted((i for i in graph.value_info if i.name in kept), key=lambda info: info.name)
    copies = [onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in infos]
    del graph.value_info[:]
    graph.value_info.extend(copies)
    del graph.quantization_annotation[:]
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.ClearField("doc_string")
        del value.metadata_props[:]
    for node in graph.node:
        node.attribute.sort(key=lambda attribute: attribute.name)
        for attribute in node.attribute:
            attribute.ClearField("doc_string")
            if attribute.type == onnx.AttributeProto.GRAPH:
                _tidy(attribute.g)
            for inner in attribute.graphs:
                _tidy(inner)
