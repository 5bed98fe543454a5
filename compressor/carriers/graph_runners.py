"""What runs a graph between two passes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from compressor.carriers.ort_runner import graph_runner
from compressor.carriers.torch_graph import GraphModule
from compressor.carriers.torch_runner import TorchRunner
from compressor.graph.values import all_nodes, is_op, value_by_name
from compressor.types.carrier import Runner

_READS_CODES = ("Cast", "CastLike", "DequantizeLinear", "Identity")


def runner_of(model: ir.Model, taps: Sequence[str]) -> Runner:
    """Start what runs a graph: ONNX Runtime, or PyTorch for what that has no kernels for.

    Args:
        model: the graph.
        taps: names of values that are returned beside the outputs.

    Raises:
        ModelError: it does not load.
    """
    if not computes_in_bfloat16(model):
        return graph_runner(model, taps)
    model = model.clone()
    values, outputs = value_by_name(model), model.graph.outputs
    known = {output.name for output in outputs}
    outputs.extend(values[name] for name in taps if name not in known)
    return TorchRunner(GraphModule(model).eval(), "the graph")


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Tell whether an operator works on bfloat16, beside those that only read a stored weight."""
    return any(
        value is not None and value.dtype == ir.DataType.BFLOAT16
        for node in all_nodes(model.graph)
        if not is_op(node, *_READS_CODES)
        for value in (*node.inputs, *node.outputs)  # a file may say types of its weights alone
    )
