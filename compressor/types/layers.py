"""A layer: one weight that is multiplied with an activation, in a form all carriers share."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

LayerKind = Literal["Conv", "ConvTranspose", "Gemm", "MatMul", "Gather"]
CONVOLUTION: LayerKind = "Conv"
LINEAR: LayerKind = "MatMul"
TABLE: LayerKind = "Gather"
"""The kinds of layer that a bare checkpoint is taken to hold."""


@dataclass(frozen=True)
class Layer:
    """One weight and how it is stored.

    The canonical form of a weight is a matrix: rows are output channels, columns everything that
    is summed over. Algorithms see that form only; :meth:`canonical` and :meth:`stored` convert.

    Attributes:
        name: the parameter's path without ``.weight``; the same on every carrier.
        kind: the operator that reads the weight.
        weight: the parameter's (initializer's) name.
        shape: the stored shape.
        dtype: the stored numpy dtype name.
        transposed: the stored matrix has its columns (what is summed over) first.
        groups: number of channel groups of a convolution.
        bias: the bias parameter's name, if there is one.
        inputs: names of the graph values that the layer reads, weight excluded.
        output: the graph value that the layer writes.
    """

    name: str
    kind: LayerKind
    weight: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    transposed: bool = False
    groups: int = 1
    bias: str | None = None
    inputs: tuple[str, ...] = ()
    output: str = ""

    @property
    def is_table(self) -> bool:
        """Whether rows of the weight are looked up, not multiplied."""
        return self.kind == "Gather"

    @property
    def is_linear(self) -> bool:
        """Whether the layer is a product of matrices."""
        return self.kind in ("Gemm", "MatMul")

    @property
    def is_convolution(self) -> bool:
        """Whether the layer is a convolution, transposed or not."""
        return self.kind in ("Conv", "ConvTranspose")

    @property
    def is_transposed_convolution(self) -> bool:
        """Whether the layer is a transposed convolution."""
        return self.kind == "ConvTranspose"

    @property
    def bias_is_separate(self) -> bool:
        """Whether the operator takes no bias, so that a node behind it adds one."""
        return self.kind == "MatMul"

    @property
    def rows(self) -> int:
        """Number of output channels (for an embedding: of table rows)."""
        if self.is_transposed_convolution:
            return self.shape[1] * self.groups
        return self.shape[-1] if self.transposed else self.shape[0]

    @property
    def columns(self) -> int:
        """Number of weights that are summed over for one output value."""
        return self.parameters // self.rows

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def output_axis(self) -> int:
        """The axis of the stored weight that runs over output channels (of one group)."""
        if self.is_transposed_convolution:
            return 1
        return len(self.shape) - 1 if self.transposed else 0

    @property
    def rows_first(self) -> bool:
        """Whether the stored weight's first axis is the canonical form's, its rows."""
        return not self.is_transposed_convolution and not self.transposed

    def canonical(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight`` (stored shape) as a matrix ``[rows, columns]``.

        Raises:
            ValueError: the tensor has another shape.
        """
        if tuple(weight.shape) != self.shape:
            raise ValueError(f"{self.weight}: shape {tuple(weight.shape)} is not {self.shape}")
        if self.is_transposed_convolution:
            per_group = self.shape[0] // self.groups
            split = weight.reshape(self.groups, per_group, self.shape[1], -1)
            return split.transpose(1, 2).reshape(self.rows, self.columns)
        if self.transposed:
            return weight.reshape(-1, self.rows).T
        return weight.reshape(self.rows, -1)

    def stored(self, matrix: torch.Tensor) -> torch.Tensor:
        """Invert :meth:`canonical`."""
        if self.is_transposed_convolution:
            per_group = self.shape[0] // self.groups
            split = matrix.reshape(self.groups, self.shape[1], per_group, -1)
            return split.transpose(1, 2).reshape(self.shape).contiguous()
        if self.transposed:
            return matrix.T.reshape(self.shape).contiguous()
        return matrix.reshape(self.shape).contiguous()
