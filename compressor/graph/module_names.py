"""Names of PyTorch modules for weights that its exporters left without one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import zip_longest

import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.stored_weights import weight_source
from compressor.graph.values import all_nodes, input_of

_SCOPES = "pkg.torch.onnx.name_scopes"
_OLD = "onnx::"  # what the exporter of TorchScript calls what it has folded
_RECURRENT = ((1, "weight_ih"), (2, "weight_hh"), (3, "bias"))


def name_by_modules(model: ir.Model) -> None:
    """Rename stored weights such as ``val_142`` or ``onnx::MatMul_142``, in place.

    PyTorch's exporters name a parameter by its path, but not what they have folded or transposed:
    the weight of most linear layers. The module's path is in the metadata of the node that reads
    it, or in the node's name (``/encoder/layers.0/fc1/MatMul``). Names with a path are kept.
    """
    taken = set(model.graph.initializers)
    taken.update(v.name for v in model.graph.inputs if v.name)
    taken.update(v.name for n in all_nodes(model.graph) for v in n.outputs if v.name)
    for node in all_nodes(model.graph):
        for value, role in _weights(node):
            path = _module_of(node) if _is_nameless(value) else ""
            if not path:
                continue
            name, number = f"{path}.{role}", 1
            while name in taken:
                name, number = f"{path}.{role}_{number}", number + 1
            taken.add(name)
            value.name = name


def _weights(node: ir.Node) -> Iterator[tuple[ir.Value, str]]:
    """Yield the initializers that are a layer's parameters, and what they are to it."""
    row = operator(node)
    roles: tuple[tuple[int, str], ...] = ()
    if row.layer is not None:
        roles = ((row.weight, "weight"), *(() if row.integer else ((2, "bias"),)))
    for index, role in _RECURRENT if row.recurrent else roles:
        value = input_of(node, index)
        source, _ = weight_source(value)
        if source is not None and source.shape is not None and len(source.shape):
            yield source, role


def _is_nameless(value: ir.Value) -> bool:
    """Whether an initializer is not called after a parameter, whose name has a path in it."""
    name = value.name or ""
    return name.startswith(_OLD) or ("." not in name and "/" not in name)


def _module_of(node: ir.Node) -> str:
    """Return the path of the module that a node belongs to; empty if it does not say."""
    scopes = node.metadata_props.get(_SCOPES)
    if scopes is not None:
        try:
            path = ast.literal_eval(scopes)[-2]
        except (ValueError, SyntaxError, IndexError, TypeError, KeyError):
            return ""
        return path if isinstance(path, str) else ""
    start, *parts = (node.name or "").split("/")
    if start or not parts or not parts[-1].startswith(node.op_type):
        return ""
    return ".".join(_steps(parts[:-1]))


def _steps(parts: list[str]) -> Iterator[str]:
    """Yield the steps of a path; that of a child in a list repeats the list: ``a/a.0/b``."""
    for part, following in zip_longest(parts, parts[1:], fillvalue=""):
        if not following.startswith(f"{part}."):
            yield part
