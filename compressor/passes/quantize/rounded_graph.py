"""Graphs whose activations are rounded as they will be; in training, not for random samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.graph.editing import Editor, insert_behind
from compressor.graph.values import value_by_name
from compressor.models.executor.node import Operator, Operators
from compressor.passes.quantize.maths.reconstruct import mixed
from compressor.passes.train.qat.operators import TRAINING_DOMAIN, CodeSpan, Places, fake_quantize
from compressor.types.layers import Scheme

_ROUND = "Round"
_SHARE = 0.5  # of samples that are not rounded in training


@dataclass(frozen=True)
class RoundedValue:
    """How an activation is quantized.

    Attributes:
        exact: codes hold its values exactly; there is nothing to train.
    """

    scale: float
    zero_point: int
    scheme: Scheme
    exact: bool = False


class Drop:
    """Takes floats in place of what is rounded, for some samples, while it is active."""

    def __init__(self, seed: int):
        self._random = torch.Generator().manual_seed(seed)
        self._active = False

    def __call__(self, exact: Tensor, rounded: Tensor) -> Tensor:
        """Return a mixture of both while active, else the rounded values."""
        return mixed(exact, rounded, _SHARE, self._random) if self._active else rounded

    @contextmanager
    def active(self) -> Iterator[None]:
        """Be active inside the block."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    @property
    def operators(self) -> Operators:
        """What runs the nodes that :func:`with_rounding` adds."""
        return {(TRAINING_DOMAIN, _ROUND): Operator(self._round)}

    def _round(
        self, x: Tensor, size: Tensor, unit: Tensor, zero: Tensor, *, low: int, high: int
    ) -> Tensor:
        """Round to codes whose step is ``size * unit``."""
        span = CodeSpan(low, high, batched=True)
        return self(x, fake_quantize(x, size, unit, Places(zero), span))


def with_rounding(
    model: ir.Model, values: Mapping[str, RoundedValue]
) -> tuple[ir.Model, dict[str, str]]:
    """Return a graph in which values are rounded, by an operator of our own.

    Returns:
        The graph, and the initializers that each value's step is multiplied with, by its name.
    """
    graph = model.clone()
    graph.opset_imports[TRAINING_DOMAIN] = 1
    editor, present, names = Editor(graph), value_by_name(graph), dict[str, str]()
    for name, rounded in values.items():
        value = present[name]
        readers = tuple(value.uses())
        numbers = {"size": 1.0, "unit": rounded.scale, "zero": rounded.zero_point}
        operands = [
            editor.constant(f"{name}.{key}", np.asarray(number, np.float32))
            for key, number in numbers.items()
        ]
        output = ir.Value(
            name=editor.free_name(f"{name}.rounded"), type=ir.TensorType(ir.DataType.FLOAT)
        )
        node = ir.node(
            _ROUND,
            [value, *operands],
            {"low": rounded.scheme.low, "high": rounded.scheme.high},
            domain=TRAINING_DOMAIN,
            outputs=[output],
            name=output.name,
        )
        insert_behind(graph.graph, value, node)
        for reader, index in readers:
            reader.replace_input_with(index, output)
        names[name] = operands[0].name or ""
    return graph, names
