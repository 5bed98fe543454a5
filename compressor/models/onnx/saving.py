"""Write a graph and its tensors to files that are read here again."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

_EXTERNAL_FROM = 256  # bytes: shapes, axes and single numbers stay in the graph


def save_graph(model: ir.Model, path: Path, external_from: int = _EXTERNAL_FROM) -> None:
    """Write a graph, with its larger tensors in the file ``NAME.data`` beside it.

    Arrays that were taken from the graph's tensors stay valid.

    Args:
        model: the graph; it is not changed.
        path: the file of the graph.
        external_from: bytes beyond which a tensor goes to the file beside it.
    """
    model = model.clone()
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes <= external_from:
                # onnx_ir would close the mapping of a file whose arrays others still hold.
                value.const_value = ir.Tensor(
                    tensor.numpy(), dtype=tensor.dtype, shape=tensor.shape, name=tensor.name
                )
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=external_from)
