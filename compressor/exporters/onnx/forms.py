"""Bring weights that are stored as codes into the form that a runtime wants."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.exporters.onnx.expansion import expand
from compressor.exporters.onnx.four_bit_floats import as_four_bit_floats
from compressor.exporters.onnx.matmul_nbits import Compute, pack, packing_of
from compressor.exporters.onnx.weight_only import weight_only
from compressor.graph.editing import Editor


def in_form_for(target: str, model: ir.Model, compute: Compute) -> ir.Model:
    """Return a model as a target wants it; the given one is not changed.

    No weight is evaluated: packed tensors are lazy, as those are that they are made of.

    Args:
        target: ``ort-cpu``, ``ort-cuda``, ``openvino`` or ``tensorrt``; the last two read
            ``DequantizeLinear`` before a product, ONNX Runtime has an operator of its own.
        model: weights lie in ``DequantizeLinear``, as passes store them.
        compute: arithmetic of products with weights that alone are quantized.
    """
    changed = model.clone()
    weights = weight_only(changed)
    if not weights:
        return model
    editor = Editor(changed)
    for weight in weights:
        if target in ("tensorrt", "openvino"):
            as_four_bit_floats(editor, weight)
            continue
        packing = packing_of(weight, compute)
        if packing is None:
            expand(editor, weight)
        else:
            pack(editor, weight, packing, compute)
    common.RemoveUnusedNodesPass()(changed)
    return changed
