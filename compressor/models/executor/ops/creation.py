"""Operators that make a tensor from next to nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.models.executor.dtypes import TORCH_DTYPES, moved
from compressor.models.executor.node import Builder, NodeView, Table
from compressor.models.executor.ops.host import integers, scalar
from compressor.models.executor.program import Op, Result


def _constant_of_shape(node: NodeView) -> Op:
    value = node.tensor("value")
    fill = torch.zeros(1) if value is None else value
    node.on_host(0)

    def run(shape: Tensor) -> Tensor:
        sizes = integers(shape)
        return moved(fill.reshape(()), lambda element: element.expand(sizes).contiguous())

    return run


def _range(node: NodeView) -> Op:
    node.on_host(0, 1, 2)

    def run(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
        first, last, step = start.item(), limit.item(), delta.item()
        count = max(math.ceil((last - first) / step), 0)
        wide = start.dtype in (torch.float16, torch.bfloat16)
        steps = torch.arange(count, dtype=torch.float32 if wide else start.dtype)
        return (first + steps * step).to(start.dtype)

    return run


def _eye_like(node: NodeView) -> Op:
    diagonal = node.integer("k", 0)
    dtype = node.element_type("dtype")

    def run(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        columns = torch.arange(x.shape[1], device=x.device)[None, :]
        return (columns - rows == diagonal).to(TORCH_DTYPES[dtype] if dtype else x.dtype)

    return run


def _dropout(node: NodeView) -> Op:
    """Nothing is dropped at inference."""
    node.ignore("ratio", "seed")
    wants_mask = node.wants(1)
    node.on_host(1, 2)
    training_mode = node.fixed_input(2)
    if training_mode is not None and bool(training_mode.item()):
        raise node.refuse("its input 'training_mode' is true")

    def run(x: Tensor, _: Tensor | None = None, training: Tensor | None = None) -> Result:
        if training is not None and bool(training.item()):
            raise ValueError("training_mode is true; export the model for inference")
        return (x, torch.ones_like(x, dtype=torch.bool)) if wants_mask else x

    return run


def _cosine_window(weights: Sequence[float]) -> Builder:
    """Sum of (-1)**k a_k cos(2 pi k n / length), the weights a_k deciding the window's name."""

    def build(node: NodeView) -> Op:
        periodic = node.flag("periodic", default=True)
        dtype = node.element_type("output_datatype", ir.DataType.FLOAT)
        assert dtype is not None
        node.on_host(0)

        def run(size: Tensor) -> Tensor:
            length = scalar(size)
            phase = torch.arange(length, dtype=torch.float64) * (2 * math.pi)
            phase = phase / max(length if periodic else length - 1, 1)
            terms = [(-1) ** k * a * torch.cos(k * phase) for k, a in enumerate(weights)]
            return torch.stack(terms).sum(0).to(TORCH_DTYPES[dtype])

        return run

    return build


CREATION: Table = {
    "BlackmanWindow": _cosine_window((0.42, 0.5, 0.08)),
    "ConstantOfShape": _constant_of_shape,
    "Dropout": _dropout,
    "EyeLike": _eye_like,
    "HammingWindow": _cosine_window((25 / 46, 21 / 46)),
    "HannWindow": _cosine_window((0.5, 0.5)),
    "Range": _range,
}
