"""Weights that a module computes of its parameters, such as those of standardized convolutions.

PyTorch computes them anew in each call, since training changes the parameters. Here they become
constants of the graph, so that its layers are found. Weights that are only moved, as where one
parameter holds those of three layers or gates are sorted, stay what they are: they are sliced and
put together, and each of their elements is still one of a parameter's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

import onnx_ir as ir
from onnx_ir import tensor_adapters
from onnx_ir.passes import common
from torch import Tensor

from compressor.graph.operators import operator
from compressor.graph.stored_weights import weight_source
from compressor.graph.values import static_shape
from compressor.models.executor import GraphModule

_WEIGHT = ".weight"
_SMALL = 256  # bytes of constants that are compared
_PLAIN = (
    *(ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING),
    *(ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS),
)


def with_computed_weights(
    model: ir.Model, parameters: Collection[str]
) -> tuple[ir.Model, frozenset[str]]:
    """Return a graph in which weights that are computed of parameters are initializers.

    They are evaluated when they are read. A layer that is called several times computes its weight
    in each call, and has one here.

    Args:
        model: not changed; itself where nothing is computed.
        parameters: the names of the module's tensors.

    Returns:
        The graph, and the names of the new initializers.
    """
    names: dict[str, str] = {}
    first: dict[ir.Value, str] = {}
    for value, (sources, equal) in _computed_weights(model, parameters).items():
        taken = {*model.graph.initializers, *names.values()}
        name = first.get(equal) or _name(sources, value.name or "", taken)
        names[value.name or ""] = first[equal] = name
    if not names:
        return model, frozenset()
    read = {name: value for value, name in reversed(names.items())}
    folded, results = model.clone(), _evaluation(model, tuple(read.values()))
    for value in [v for node in folded.graph for v in node.outputs if v.name in names]:
        name = names[value.name or ""]
        if name not in folded.graph.initializers:
            weight = _initializer(name, value, partial(_result, results, read[name]))
            folded.graph.initializers[name] = weight
        value.replace_all_uses_with(folded.graph.initializers[name])
    common.RemoveUnusedNodesPass()(folded)
    return folded, frozenset(names.values())


@dataclass(frozen=True)
class _Origin:
    """What a constant is made of: its parameters, and whether anything is computed with them."""

    parameters: tuple[str, ...]
    computed: bool


def _computed_weights(
    model: ir.Model, parameters: Collection[str]
) -> Mapping[ir.Value, tuple[tuple[str, ...], ir.Value]]:
    """Return the weights of products that are computed of constants.

    Each with its parameters, and with the first value that is computed as it is.
    """
    origins = {
        value: _Origin((name,) if name in parameters else (), computed=False)
        for name, value in model.graph.initializers.items()
    }
    weights: dict[ir.Value, tuple[tuple[str, ...], ir.Value]] = {}
    made: dict[Any, ir.Node] = {}  # the first node that computes something
    equal: dict[ir.Value, ir.Value] = {}
    for node in model.graph:
        inputs = [value for value in node.inputs if value is not None]
        row = operator(node)
        if not row.random and row.family != "control" and all(v in origins for v in inputs):
            origin = _merged(
                [origins[v] for v in inputs if _is_float(v)], computes=not _moves(node)
            )
            origins.update(dict.fromkeys(node.outputs, origin))
            first = made.setdefault(_form(node, parameters, equal), node)
            equal.update(zip(node.outputs, first.outputs, strict=False))
        elif row.is_product and len(node.inputs) > row.weight:
            value = node.inputs[row.weight]
            source = None if value is None else origins.get(value)
            if value is None or source is None or weight_source(value)[0] is not None:
                continue
            if source.computed and source.parameters and static_shape(value) is not None:
                weights[value] = source.parameters, equal[value]
    return weights


def _form(node: ir.Node, parameters: Collection[str], equal: Mapping[ir.Value, ir.Value]) -> Any:
    """Return what nodes have in common that compute the same; the node itself if that is unsure."""
    attributes = node.attributes.values()
    if any(attribute.type not in _PLAIN for attribute in attributes):
        return node
    read = [
        None if value is None else _content(value, parameters) or equal.get(value, value)
        for value in node.inputs
    ]
    options = frozenset((attribute.name, repr(attribute.value)) for attribute in attributes)
    return (node.domain, node.op_type, options, len(node.outputs), tuple(read))


def _content(value: ir.Value, parameters: Collection[str]) -> Any:
    """Return the numbers of a constant of the graph's own, such as axes; else nothing."""
    tensor = value.const_value
    if tensor is None or value.name in parameters or tensor.nbytes > _SMALL:
        return None
    return (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())


def _merged(origins: list[_Origin], *, computes: bool) -> _Origin:
    names = dict.fromkeys(name for origin in origins for name in origin.parameters)
    return _Origin(tuple(names), computes or any(origin.computed for origin in origins))


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _moves(node: ir.Node) -> bool:
    """Whether a node only moves or repeats elements."""
    row = operator(node)
    split = row.passes_factor and not row.activation and row.family in ("other", "split", "unary")
    return bool(row.moves) or row.is_table or split or row.family in ("concat", "shape")


def _name(parameters: tuple[str, ...], value: str, taken: Collection[str]) -> str:
    """Return ``layer.weight`` after the parameters of a layer, unless one of them is called so."""
    paths = [name.split(".")[:-1] for name in parameters]
    levels = zip(*paths, strict=False)
    shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    if "parametrizations" in shared:  # PyTorch keeps them below the layer
        shared = shared[: shared.index("parametrizations")]
    prefix = ".".join(shared) or value
    names = (f"{prefix}{middle}{_WEIGHT}" for middle in ("", ".computed"))
    return next((name for name in names if name not in taken), f"{value}{_WEIGHT}")


def _evaluation(model: ir.Model, names: tuple[str, ...]) -> Callable[[], dict[str, Tensor]]:
    """Return a function that computes values, all of them when it is called first."""

    @cache
    def results() -> dict[str, Tensor]:
        part = model.clone()
        values = {v.name: v for node in part.graph for v in node.outputs}
        part.graph.outputs.clear()
        part.graph.outputs.extend(values[name] for name in names)
        common.RemoveUnusedNodesPass()(part)
        part.graph.inputs.clear()
        return {name: tensor.detach() for name, tensor in GraphModule(part).eval()().items()}

    return results


def _result(results: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
    return results()[name]


def _initializer(name: str, like: ir.Value, read: Callable[[], Tensor]) -> ir.Value:
    dtype, shape = like.dtype, static_shape(like)
    assert dtype is not None
    assert shape is not None
    tensor = ir.LazyTensor(
        lambda: tensor_adapters.TorchTensor(read().contiguous(), name=name),
        dtype,
        ir.Shape(shape),
        name=name,
    )
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
