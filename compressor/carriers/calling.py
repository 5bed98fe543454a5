"""How a module is called, and what its outputs are, whatever its forward looks like."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressor.errors import ModelError


def call(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Call a module with inputs by name, or in their order where its forward has other names.

    Returns:
        Its output tensors, in the order of the outputs of its graph.
    """
    named = set(inspect.signature(module.forward).parameters)
    by_name = named.issuperset(tensors)
    result = module(**tensors) if by_name else module(*tensors.values())
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class NamedModule(nn.Module):
    """A module whose inputs and outputs have names.

    Args:
        module: the network.
        inputs: names of its inputs, in the order of its forward.
        outputs: names of its outputs, in their order.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[str], outputs: Sequence[str]):
        super().__init__()
        self.module = module
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Run the network.

        Args:
            tensors: the inputs by name.

        Returns:
            The outputs by name.

        Raises:
            ModelError: it returns another number of tensors than its graph.
        """
        found = call(self.module, {name: tensors[name] for name in self.inputs})
        if len(found) != len(self.outputs):
            raise ModelError(
                f"module {type(self.module).__name__}",
                f"returns {len(found)} tensors in training and {len(self.outputs)} in evaluation "
                f"({', '.join(self.outputs)})",
                "let its forward return the same in both",
            )
        return dict(zip(self.outputs, found, strict=True))
