"""A graph without its weights: as JSON, and through the converters of opsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
import onnx_ir.passes.common as common
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from onnx import TensorProto, defs, helper

from compressor.errors import ModelError, first_line
from compressor.graph.bodies import settle_constants
from compressor.graph.codebooks import code_widths, narrow
from compressor.graph.messages import broken_node, cyclic_function, expansion, tensors_in
from compressor.graph.operators import RESIZE
from compressor.graph.values import DEFAULT_DOMAINS, all_nodes, constant_of, value_by_name
from compressor.types.tensors import Array

if TYPE_CHECKING:
    from onnx_ir.passes import InPlacePass


_SMALL = 16  # elements: longer constants become initializers, so that they are stored as weights


@dataclass(frozen=True)
class Skeleton:
    """A model in a canonical form, separated from its weights.

    Attributes:
        proto: the model; its initializers, sorted by name, have a name, a type and a shape but no
            data. Equal graphs give equal messages.
        tensors: the initializers' values by name, in the same order; none was evaluated.
        widths: bits of the codes that have fewer than their element type, by name; empty unless
            the skeleton is narrowed.
    """

    proto: onnx.ModelProto
    tensors: dict[str, ir.TensorProtocol]
    widths: dict[str, int]


def skeleton(model: ir.Model, *, narrowed: bool = False) -> Skeleton:
    """Separate a model from its weights; the model is not changed.

    Args:
        narrowed: store codes in the narrowest element type, even if the opset lacks it, and note
            their widths.

    All initializers belong to the main graph. Metadata, producer names and inferable shapes are
    left out; the shapes of operators outside the ONNX standard are kept, as nothing infers them.

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
    widths = code_widths(plain) if narrowed else {}  # before notes go
    settle_constants(plain, _SMALL)
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


_ARRAYS = frozenset(
    {
        *(ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE),
        *(ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32, ir.DataType.INT64),
    }
)


def detached_weights(model: ir.Model, kept: int) -> dict[str, Array]:
    """Replace large weights of numpy's own types by references to a file that is not there.

    A model whose nodes have branches keeps all, since runtimes look for the weights of a branch in
    the file alone.

    Args:
        model: changed in place.
        kept: bytes up to which weights stay.

    Returns:
        Their values by name, in memory or mapped, but not copied.
    """
    weights: dict[str, Array] = {}
    if any(node.graph is not model.graph for node in all_nodes(model.graph)):
        return weights
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= kept or tensor.dtype not in _ARRAYS:
            continue
        if not value.uses():  # runtimes have dropped it before they look for its values
            continue
        weights[name] = np.ascontiguousarray(tensor.numpy())
        value.const_value = ir.ExternalTensor(
            "none", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
        )
    return weights


def graph_as_json(proto: onnx.ModelProto) -> dict[str, Any]:
    """Return a skeleton's message in protobuf's JSON mapping."""
    document: dict[str, Any] = json_format.MessageToDict(proto)
    return document


def graph_from_json(document: Mapping[str, Any], subject: str) -> ir.Model:
    """Return the graph that :func:`graph_as_json` wrote; its initializers have no data.

    Raises:
        ModelError: it is not an ONNX model.
    """
    try:
        proto = json_format.ParseDict(dict(document), onnx.ModelProto())
        _check_bounded(proto)
        model = ir.from_proto(proto)
        _check_given(model)
    except (
        json_format.ParseError,
        DecodeError,
        ir.serde.SerdeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        SystemError,  # of protobuf, for names that are no text
    ) as error:
        raise ModelError(
            subject,
            f"does not hold an ONNX graph ({first_line(error)})",
            "it was edited or damaged; export the model again",
        ) from error
    return model


def _check_bounded(proto: onnx.ModelProto) -> None:
    """Raise ``ValueError`` if a tensor lies in a file, or the functions would have no end."""
    for tensor in tensors_in(proto):
        if tensor.external_data or tensor.data_location == TensorProto.EXTERNAL:
            raise ValueError(f"tensor {tensor.name!r} refers to a file")
    cyclic = cyclic_function(proto)
    problem = f"function {cyclic!r} calls itself" if cyclic else expansion(proto)
    problem = problem or broken_node(proto)
    if problem:
        raise ValueError(problem)


def _check_given(model: ir.Model) -> None:
    """Raise ``ValueError`` if a node reads what nothing gives, or an input has no type."""
    for end in (*model.graph.inputs, *model.graph.outputs):
        if end.dtype is ir.DataType.UNDEFINED:
            raise ValueError(f"{end.name!r} has no element type")
    for node in all_nodes(model.graph):
        for value in node.inputs:
            if value is None or value.producer() is not None or value.is_graph_input():
                continue
            if not value.is_initializer():
                raise ValueError(f"node {node.name!r} reads {value.name!r}, which nothing writes")


def _detach(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """Replace all initializers by empty ones of the same type and shape; return the old values."""
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
    kept = {
        name for node in graph.node if node.domain not in DEFAULT_DOMAINS for name in node.output
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


_READ_BY_CONVERTER = 1024  # bytes: axes and shapes, whose values some conversions need


def converted(model: ir.Model, opset: int) -> ir.Model:
    """Return a copy of the graph in another opset, older or newer.

    The converter copies its input and takes no message of 2 GB. So weights are passed as inputs
    without a value and attached again afterwards.

    Raises:
        RuntimeError: an operator cannot be converted.
        onnx_ir.serde.SerdeError: the converter wrote a graph that cannot be read.
        ModelError: an initializer has no value.
    """
    have = model.opset_imports.get("", opset)
    if have < _ONE_AXIS <= opset:
        _check_flattened(model)
    parts = skeleton(model)
    proto = parts.proto
    proto.ir_version = max(proto.ir_version, 4)  # initializers need not be inputs from there on
    _drop_defaults(proto.graph, have, opset)
    if opset < _PADS_AXES <= have:
        _set_pads_aside(proto)
    inputs = len(proto.graph.input)
    # Turn empty initializers into inputs, except those whose values a conversion reads.
    filled = []
    for empty in proto.graph.initializer:
        tensor = parts.tensors[empty.name]
        lazy = isinstance(tensor, ir.LazyTensor)
        if tensor.dtype == ir.DataType.INT64 and tensor.nbytes <= _READ_BY_CONVERTER and not lazy:
            empty.raw_data = tensor.tobytes()
            filled.append(empty)
            continue
        proto.graph.input.append(
            helper.make_tensor_value_info(empty.name, empty.data_type, list(empty.dims))
        )
    kept = [TensorProto.FromString(tensor.SerializeToString()) for tensor in filled]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    try:
        result = ir.from_proto(onnx.version_converter.convert_version(proto, opset))
    except onnx.shape_inference.InferenceError as error:  # of an operator that ONNX does not know
        raise RuntimeError(str(error)) from error
    graph = result.graph
    # Deleting a slice would leave these values marked as inputs.
    weights = [graph.inputs.pop() for _ in range(len(graph.inputs) - inputs)][::-1]
    for value in weights:
        value.const_value = parts.tensors[value.name or ""]
        graph.register_initializer(value)
    if have < _PLACES_STATED <= opset:
        _state_places(result)
    if result.opset_imports.pop(_ASIDE, None):
        for node in all_nodes(result.graph):
            node.domain = "" if node.domain == _ASIDE else node.domain
    _restore_types(model, result)
    return result


_PLACES_STATED = 11  # the first opset that says where the pixels of a resized image lie
_PADS_AXES = 18  # the first whose Pad may name axes
_ASIDE = "compressor.aside"
_ONE_AXIS = 13  # the first whose softmax and its kind are along one axis, not over all from one on


def _state_places(model: ir.Model) -> None:
    """State how ``Resize`` placed pixels before opset 11; the converter takes the later default."""
    for node in all_nodes(model.graph):
        if node.op_type != RESIZE or node.domain not in DEFAULT_DOMAINS:
            continue
        node.attributes["coordinate_transformation_mode"] = ir.AttrString(
            "coordinate_transformation_mode", "asymmetric"
        )
        scales = constant_of(node.inputs[2])
        smaller = scales is not None and bool((scales.numpy() <= 1).all())
        nearest = "ceil" if smaller else "floor"  # as ONNX Runtime rounds in these opsets
        node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", nearest)
        region, graph = node.inputs[1], model.graph
        node.replace_input_with(1, None)  # only another mode reads it
        if region is not None and region.is_initializer() and not region.uses():
            graph.initializers.pop(region.name or "", None)


def _set_pads_aside(proto: onnx.ModelProto) -> None:
    """Hide what pads all axes from the converter, which takes no ``Pad`` below opset 18.

    From there on it may name axes, and wrap around: else it is the same operator.
    """
    for node in proto.graph.node:
        modes = [a.s for a in node.attribute if a.name == "mode"]
        if node.op_type == "Pad" and _has(node, _PADS_AXES) and len(node.input) <= 3:
            node.domain = node.domain if b"wrap" in modes else _ASIDE
    proto.opset_import.append(helper.make_opsetid(_ASIDE, 1))


def _check_flattened(model: ir.Model) -> None:
    """Check that no ``Hardmax`` is over several axes, which the converter forgets.

    Raises:
        RuntimeError: one is.
    """
    for node in all_nodes(model.graph):
        if node.op_type == "Hardmax" and node.domain in DEFAULT_DOMAINS:
            value = node.inputs[0]
            rank = 0 if value is None or value.shape is None else len(value.shape)
            if node.attributes.get_int("axis", 1) not in (-1, rank - 1):
                raise RuntimeError("Hardmax over several axes")


def _drop_defaults(graph: onnx.GraphProto, have: int, opset: int) -> None:
    """Remove attributes that the target opset lacks if they only state the default."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _drop_defaults(attribute.g, have, opset)
        if not (_has(node, opset) and _has(node, have)):
            continue
        kept = defs.get_schema(node.op_type, opset, "").attributes
        present = defs.get_schema(node.op_type, have, "").attributes
        useless = [
            a for a in node.attribute if a.name not in kept and _is_default(a, present.get(a.name))
        ]
        for attribute in useless:
            node.attribute.remove(attribute)


def _has(node: onnx.NodeProto, opset: int) -> bool:
    return node.domain in ("", "ai.onnx") and defs.has(node.op_type, opset, "")


def _is_default(attribute: onnx.AttributeProto, formal: defs.OpSchema.Attribute | None) -> bool:
    if formal is None or not formal.default_value.name:
        return False
    default = helper.get_attribute_value(formal.default_value)
    return bool(np.array_equal(helper.get_attribute_value(attribute), default))


def _restore_types(model: ir.Model, converted: ir.Model) -> None:
    """Restore the types and shapes of inputs, outputs and intermediate values.

    The converter renames dynamic axes and loses shapes that its own inference does not find.
    """
    before = value_by_name(model)
    for name, value in value_by_name(converted).items():
        original = before.get(name)
        if original is not None and original.type is not None and value.const_value is None:
            value.type, value.shape = original.type, original.shape
