"""Inspect graphs: ONNX files, ONNX Runtime's, and what the safetensors exporter writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch

from compressor.errors import ModelError, printable
from compressor.exporters.ort.reading import ort_model
from compressor.files import read_json
from compressor.graph.bodies import in_turns
from compressor.graph.codebooks import codebook_of
from compressor.graph.costs import at_lengths, macs, node_macs, parameters, turn_notes
from compressor.graph.inference import infer_shapes
from compressor.graph.layers import graph_layers, layer_of
from compressor.graph.operators import operator_named
from compressor.graph.values import all_nodes, constant_array, input_of, tensor_spec
from compressor.lab.inspect.contents import (
    Counts,
    GraphFacts,
    ModelContents,
    TensorRow,
    count_array,
    not_finite_note,
    percent,
)
from compressor.lab.inspect.stored import SIDE, SMALL, facts, mapped
from compressor.models.codec.forms import DESCRIPTION, FORMAT
from compressor.models.codec.headers import INDEX
from compressor.models.codec.load import check
from compressor.models.codec.reading import (
    Description,
    read_description,
    read_tensors,
    stored_headers,
)
from compressor.models.lazy_tensor import computed
from compressor.models.onnx.file import checked_model, external_files, read_onnx
from compressor.progress import Progress
from compressor.types.tensors import Array

if TYPE_CHECKING:
    from onnx_ir.passes import InPlacePass


_ORT = "ONNX Runtime model"
_NAMED = 3  # layers in a note
_DEFAULT_DOMAIN = "ai.onnx"
_SIGNED = (ir.DataType.INT8, ir.DataType.INT4)


def inspect_graph(
    model: ir.Model, kind: str, path: str, files: Mapping[str, int], progress: Progress
) -> ModelContents:
    """Describe a model; its shapes have been inferred already."""
    # A copy with all that is stored in the main graph: of branches, loops, constants.
    stored = model.clone()
    steps: list[InPlacePass] = [
        common.InlinePass(),
        common.LiftConstantsToInitializersPass(size_limit=SMALL),
        common.LiftSubgraphInitializersToMainGraphPass(),
    ]
    for step in steps:
        step(stored)
    costs: Counter[str] = Counter()
    uncounted: dict[str, None] = {}
    sized = at_lengths(stored)
    for node, turns in in_turns(sized.graph):
        layer = layer_of(node)
        if layer is None:
            continue
        work = turns * node_macs(node)
        costs[layer.weight] += work
        if not work and not layer.is_table:
            uncounted[layer.weight] = None
    for name in uncounted:
        del costs[name]
    weights = {layer.weight for layer in graph_layers(stored)}
    initializers = {n: v for n, v in stored.graph.initializers.items() if v.const_value is not None}
    rows: list[TensorRow] = []
    notes = turn_notes(stored)
    if uncounted:
        listed = ", ".join(map(printable, islice(uncounted, _NAMED)))
        more = f" and {len(uncounted) - _NAMED} more" if len(uncounted) > _NAMED else ""
        notes.append(f"MACs of {listed}{more} are not counted: their shapes are not known")
    with progress.stage("read tensors", len(initializers)) as advance:
        for name, value in initializers.items():
            row, not_finite = _row(name, value, costs.get(name), weights)
            rows.append(row)
            if not_finite:
                notes.append(not_finite_note(name, not_finite))
            advance(len(rows))
    # Share of zeros among the weights: floating-point numbers and codes, but no scales.
    zeros = elements = 0.0
    for row in rows:
        dtype = stored.graph.initializers[row.name].dtype
        weight = row.quantization or (dtype is not None and dtype.is_floating_point())
        if weight and row.zeros is not None:
            zeros += row.zeros * prod(row.shape)
            elements += prod(row.shape)
    return ModelContents(
        kind=kind,
        path=path,
        files=files,
        tensors=tuple(rows),
        parameters=parameters(stored),
        zeros=zeros / elements if elements else None,
        notes=tuple(notes),
        graph=_facts(model, macs(sized)),
    )


def _facts(model: ir.Model, cost: int) -> GraphFacts:
    operators = (
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in all_nodes(model.graph)
    )
    producer = " ".join(p for p in (model.producer_name, model.producer_version) if p)
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    ends = [map(tensor_spec, values) for values in (inputs, model.graph.outputs)]
    return replace(
        facts(operators, ends, producer),
        opsets={domain or _DEFAULT_DOMAIN: v for domain, v in model.opset_imports.items()},
        macs=cost,
        metadata=dict(model.metadata_props),
    )


def _row(
    name: str, value: ir.Value, cost: int | None, weights: Collection[str]
) -> tuple[TensorRow, int]:
    """Describe a tensor, and count its values that are NaN or infinite."""
    tensor = value.const_value
    assert tensor is not None
    shape = tuple(int(d) for d in tensor.shape.numpy())
    scheme, zero_point = _coding(value, shape)
    if not scheme and name in weights and value.dtype in _SIGNED:  # dequantized by other operators
        scheme = value.dtype.numpy().name
    counts = _counted(tensor, zero_point)
    zeros = None if counts is None or scheme in SIDE else percent(counts.zeros, tensor.size)
    row = TensorRow(
        name=name,
        shape=shape,
        dtype=tensor.dtype.numpy().name,
        bytes=tensor.nbytes,
        zeros=zeros,
        quantization=scheme,
        macs=cost,
    )
    return row, 0 if counts is None else counts.not_finite


def _counted(tensor: ir.TensorProtocol, zero_point: Array | None) -> Counts | None:
    """Count the elements of a tensor; ``None`` for text.

    Args:
        zero_point: the code of zero, in a shape that broadcasts to the tensor's; 0 without one.
    """
    if tensor.dtype == ir.DataType.STRING:
        return None
    array = np.asarray(tensor.numpy())
    if zero_point is None or not np.any(zero_point):
        return count_array(array)
    return Counts(int(np.count_nonzero(array.astype(zero_point.dtype, copy=False) == zero_point)))


def _coding(value: ir.Value, shape: tuple[int, ...]) -> tuple[str, Array | None]:
    """Return how a tensor's codes are to be read, and the code of zero."""
    book = codebook_of(value)
    if book is not None:
        return str(book), book.zero_codes()
    for use in value.uses():
        node, index = use.node, use.idx
        row = operator_named(node.op_type)
        if row.packed and index == 1:
            group = node.attributes.get_int("block_size", 0)
            return f"int{node.attributes.get_int('bits', 4)}/group {group}", None
        if row.family == "quantization" and 0 < index <= len(SIDE):
            return SIDE[index - 1], None
        if row.codes is None or row.codes.codes != index or value.dtype is None:
            continue
        positions = (row.codes.scale, row.codes.zero_point)
        scale, zero = (constant_array(None if p is None else input_of(node, p)) for p in positions)
        asymmetric = " asym" if zero is not None and np.any(zero) else ""
        scheme = value.dtype.numpy().name + _granularity(node, scale) + asymmetric
        return scheme, None if zero is None else _broadcast(node, zero, shape)
    return "", None


def _granularity(node: ir.Node, scale: Array | None) -> str:
    if scale is None:
        return ""
    block = node.attributes.get_int("block_size", 0)
    if block:
        return f"/group {block}"
    return "/tensor" if scale.size == 1 else "/channel"


def _broadcast(node: ir.Node, zero: Array, shape: tuple[int, ...]) -> Array:
    if zero.size == 1:
        return zero.reshape(())
    codes = operator_named(node.op_type).codes
    axis = node.attributes.get_int("axis", 0 if codes is None else codes.axis)
    block = node.attributes.get_int("block_size", 0)
    if block:
        return np.repeat(zero, block, axis=axis).take(range(shape[axis]), axis=axis)
    spread = [1] * len(shape)
    spread[axis] = zero.size
    return zero.reshape(spread)


def inspect_onnx(path: Path, progress: Progress) -> ModelContents:
    """Describe an ONNX file and its external data.

    Raises:
        ModelError: it is cut, not ONNX, or breaks ONNX's rules.
    """
    model = read_onnx(path)
    files = {path.name: path.stat().st_size}
    for file in external_files(path):
        files[str(file.relative_to(path.parent))] = file.stat().st_size
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    infer_shapes(model)
    return inspect_graph(model, "ONNX model", str(path), files, progress)


def inspect_ort(path: Path, progress: Progress) -> ModelContents:
    """Describe a file of ONNX Runtime's own format; its nodes are those of the optimized graph.

    Raises:
        ModelError: it is not such a file, is cut or damaged, or breaks ONNX's rules.
    """
    with mapped(path, f"an {_ORT}") as data:
        proto, _ = ort_model(data)
        size = len(data)
    model = checked_model(proto, path, f"model {str(path)!r}")
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    used = {node.domain for node in all_nodes(model.graph)}
    for domain in set(model.opset_imports) - used - {""}:  # the runtime lists all that it knows
        del model.opset_imports[domain]
    contents = inspect_graph(model, _ORT, str(path), {path.name: size}, progress)
    if used <= {""} or contents.graph is None:
        return contents
    # Of the runtime's own operators no costs are known, and a part of the sum says nothing.
    rows = tuple(replace(row, macs=None) for row in contents.tensors)
    return replace(contents, tensors=rows, graph=replace(contents.graph, macs=None))


def compressed_folder(path: Path) -> Path | None:
    """Return the folder of the compressed model that ``path`` is or belongs to, if there is one.

    Args:
        path: the folder, its ``model.json``, or weights or an index that this names.
    """
    folder = path if path.is_dir() else path.parent
    document = _mapping(folder / DESCRIPTION)
    if document.get("format") != FORMAT:
        return None
    weights = document.get("weights")
    shards = _mapping(folder / INDEX).get("weight_map") if weights == INDEX else None
    names = [DESCRIPTION, weights, *(shards.values() if isinstance(shards, dict) else ())]
    return folder if path.is_dir() or path.name in names else None


def inspect_compressed(folder: Path, progress: Progress) -> ModelContents:
    """Describe a compressed model.

    Raises:
        ModelError: a file is missing, cut or edited.
    """
    check(folder)  # that all files are whole and belong together
    description = read_description(folder / DESCRIPTION)
    headers = stored_headers(description, folder)
    tensors = read_tensors(description, headers, mapped=True)
    model = description.model()
    for name, value in model.graph.initializers.items():
        value.const_value = _elements(name, tensors[name], description.tensors[name].dtype)
    infer_shapes(model)
    names = [description.weights, *(header.path.name for header in headers), DESCRIPTION]
    files = {name: (folder / name).stat().st_size for name in dict.fromkeys(names)}
    contents = inspect_graph(model, "compressed model", str(folder), files, progress)
    sizes = {t.name: t.nbytes for header in headers for t in header.tensors.values()}
    rows = tuple(_stored(row, description, sizes) for row in contents.tensors)
    return replace(contents, tensors=rows)


def _mapping(path: Path) -> dict[str, object]:
    try:
        document = read_json(path, "", "")
    except ModelError:
        return {}
    return document if isinstance(document, dict) else {}


def _stored(row: TensorRow, description: Description, sizes: dict[str, int]) -> TensorRow:
    entry = description.tensors.get(row.name)
    if entry is None:  # a constant of a node
        return row
    nbytes = sum(sizes[part] for part in entry.parts(row.name))
    return replace(row, bytes=nbytes, storage=str(entry.form or ""))


def _elements(name: str, tensor: torch.Tensor, dtype: ir.DataType) -> ir.TensorProtocol:
    def read() -> ir.TensorProtocol:
        return ir.Tensor(_array(computed(tensor), dtype), dtype=dtype)

    return ir.LazyTensor(read, dtype, ir.Shape(tensor.shape), name=name)


def _array(tensor: torch.Tensor, dtype: ir.DataType) -> Array:
    held = dtype.numpy()
    if dtype.bitwidth < 8:  # one a byte
        held = np.dtype(np.int8 if dtype.is_signed() else np.uint8)
        held = np.dtype(ml_dtypes.float8_e4m3fn) if dtype.is_floating_point() else held
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(held)
    return flat.reshape(tensor.shape).astype(dtype.numpy(), copy=False)
