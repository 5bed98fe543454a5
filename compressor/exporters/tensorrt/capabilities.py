"""Which element types a GPU of which compute capability has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
from onnx_ir import DataType

from compressor.errors import SpecError
from compressor.exporters.onnx.owners import Owners
from compressor.graph.values import all_nodes, constant_of

_TITLES: Mapping[DataType, str] = {
    DataType.BFLOAT16: "bfloat16",
    DataType.INT4: "int4",
    DataType.FLOAT8E4M3FN: "fp8",
    DataType.FLOAT4E2M1: "fp4",
}
_FIRST: Mapping[DataType, tuple[int, int]] = {
    DataType.BFLOAT16: (8, 0),
    DataType.INT4: (8, 0),
    DataType.FLOAT8E4M3FN: (8, 9),
    DataType.FLOAT4E2M1: (10, 0),
}
"""The lowest compute capability whose GPUs have the type; others are in all of TensorRT's.

Measured with TensorRT-RTX 1.7, which builds for 7.5, 8.0, 8.6, 8.9, 12.0 and 12.1; 10.0 for fp4 is
from NVIDIA's support matrix.
"""


def check_known(targets: Sequence[str], known: Sequence[str], builder: str) -> None:
    """Raise where a builder does not know a compute capability.

    Raises:
        SpecError: naming the first, and those that there are.
    """
    for target in targets:
        if target not in known:
            raise SpecError(
                "compute-capability",
                f"{target!r} is not one that builder {builder!r} builds for",
                f"choose from {', '.join(known)}",
            )


def check_types(model: ir.Model, targets: Sequence[str], known: Sequence[str]) -> None:
    """Raise where a target's GPUs lack an element type of the graph.

    Args:
        model: the graph as TensorRT gets it.
        targets: compute capabilities, such as ``8.6``.
        known: all that the builder builds for.

    Raises:
        SpecError: naming the layer or node, the type, and the capabilities that have it.
    """
    for node, dtype in _typed(model):
        lacking = [target for target in targets if _number(target) < _FIRST[dtype]]
        if not lacking:
            continue
        able = [other for other in known if _number(other) >= _FIRST[dtype]]
        raise SpecError(
            Owners(model).subject(node),
            f"is {_TITLES[dtype]}, which GPUs of compute capability {', '.join(lacking)} do not "
            "have",
            (f"build for {', '.join(able)}" if able else "use another builder")
            + ", or choose another type",
        )


def _typed(model: ir.Model) -> Iterator[tuple[ir.Node, DataType]]:
    """Yield the nodes that read or give a type that not all GPUs have."""
    for node in all_nodes(model.graph):
        for value in (*node.inputs, *node.outputs):
            if value is None:
                continue
            tensor = constant_of(value)
            dtype = value.dtype if tensor is None else tensor.dtype
            if dtype is not None and dtype in _FIRST:
                yield node, dtype


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)
