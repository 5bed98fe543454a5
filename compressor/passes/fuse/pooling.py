"""Recognise global average pooling, which unlike ReduceMean has integer kernels."""

from __future__ import annotations

import onnx_ir as ir

from compressor.graph.values import is_op
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.edit import axes_of, put, rank, replace

_IMAGE_RANKS = (4, 5)


def mean_to_pool(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace a mean over all spatial axes of ``[N, C, H, W]`` (or 3-D) by GlobalAveragePool.

    A mean that drops the axes gets a Flatten behind it. Means of ``[N, T, C]`` are left alone:
    there they are usually part of a normalization.
    """
    if not is_op(node, "ReduceMean"):
        return False
    source = node.inputs[0]
    count = rank(source)
    if source is None or count not in _IMAGE_RANKS:
        return False
    axes = axes_of(node, count)
    if axes is None or sorted(axes) != list(range(2, count)):
        return False
    if source.dtype is None or not source.dtype.is_floating_point():
        return False
    if node.attributes.get_int("keepdims", 1):
        replace(node, "GlobalAveragePool", [source])
        return True
    pool = put(node, "GlobalAveragePool", [source])
    if source.shape is not None:
        pool.outputs[0].shape = ir.Shape([*source.shape[:2], *[1] * (count - 2)])
    pool.outputs[0].name = f"{node.outputs[0].name}_pool"
    replace(node, "Flatten", [pool.outputs[0]], {"axis": 1})
    return True
