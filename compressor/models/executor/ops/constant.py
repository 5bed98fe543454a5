"""Values that a node carries itself."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.models.executor.node import NodeView


def constant_tensor(node: NodeView) -> Tensor:
    """Return the value of a ``Constant`` node.

    Raises:
        ModelError: it is a string or a sparse tensor.
    """
    value = node.tensor("value")
    if value is not None:
        return value
    if node.has("value_float"):
        return torch.tensor(node.number("value_float"), dtype=torch.float32)
    if node.has("value_int"):
        return torch.tensor(node.integer("value_int"), dtype=torch.int64)
    numbers = node.numbers("value_floats")
    if numbers is not None:
        return torch.tensor(numbers, dtype=torch.float32)
    integers = node.integers("value_ints")
    if integers is not None:
        return torch.tensor(integers, dtype=torch.int64)
    raise node.refuse("the constant is a string, a sparse tensor, or has no value")
