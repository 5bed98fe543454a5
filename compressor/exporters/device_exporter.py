"""What runtimes for phones take of codes: int8 for weights, one byte for activations."""

from __future__ import annotations

import onnx_ir as ir

from compressor.errors import SpecError
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, computes_scale, constant_of


def check_codes(model: ir.Model, runtime: str) -> None:
    """Refuse codes that a runtime for phones has no type or no kernel for.

    Args:
        model: the graph.
        runtime: its name, for the message.

    Raises:
        SpecError: naming the node, and what to change.
    """
    for node in all_nodes(model.graph):
        row = operator(node)
        if computes_scale(node) or row.integer:
            raise SpecError(
                f"node {node.name!r} ({node.op_type})", f"{runtime} does not take it",
                "use quantize-static, which fixes scales before",
            )  # fmt: skip
        if row.family != "quantization":
            continue
        codes = node.outputs[0] if row.quantizes else node.inputs[0]
        stored = codes is not None and constant_of(codes) is not None
        kind = "weights" if stored else "activations"
        dtype = None if codes is None else codes.dtype
        subject = f"node {node.name!r} ({node.op_type})"
        if node.attributes.get_int("block_size", 0):
            raise SpecError(
                subject, f"has scales for groups of a row, which {runtime} has not",
                "set granularity: channel",
            )  # fmt: skip
        other = ir.DataType.INT32 if stored else ir.DataType.UINT8
        allowed = (ir.DataType.INT8, other)
        if dtype is not None and dtype not in allowed:
            raise SpecError(
                subject, f"its {kind} are {dtype.name.lower()}, and {runtime}'s are int8",
                "set bits: 8, and leave symmetric out",
            )  # fmt: skip
