"""What is done at each step of quantization-aware training beside the gradient step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.executor import GraphModule
from compressor.passes.train.preparing import PREFIX
from compressor.passes.train.qat_graph import FROZEN, FakeQuantized, ScaleNames
from compressor.passes.train.qat_points import ActivationPoint

_MOST_CHANGE = 0.01  # share by which a scale may change in a step
_FARTHEST = 64.0  # times smaller or larger than at the beginning: positive, and far from overflow


class ScalesInRange:
    """Keeps scales positive and from jumping, and zero points among the codes.

    A scale's gradient is a sum with many signs, and where a channel's weights are small, or codes
    are many, one step of gradient descent may be several times the scale itself.

    Args:
        module: what is trained.
        quantized: names its scales.
        activations: by the value's name.
    """

    def __init__(
        self,
        module: nn.Module,
        quantized: FakeQuantized,
        activations: Mapping[str, ActivationPoint],
    ):
        parameters = dict(module.named_parameters())
        names: list[ScaleNames] = [*quantized.weights.values(), *quantized.activations.values()]
        self._sizes = [parameters[PREFIX + n.size] for n in names if n.size in quantized.trained]
        self._before: list[Tensor] = []
        self._offsets = []
        for value, own in quantized.activations.items():
            if own.offset is not None:
                point = activations[value]
                steps = point.high - point.low
                least = (point.low - point.zero_point) / steps
                most = (point.high - point.zero_point) / steps
                self._offsets.append((parameters[PREFIX + own.offset], least, most))

    def before(self, step: int) -> None:  # noqa: ARG002
        """Keep the scales."""
        self._before = [size.detach().clone() for size in self._sizes]

    @torch.no_grad()
    def after(self, step: int) -> None:  # noqa: ARG002
        """Bring back what a step has moved too far."""
        for size, old in zip(self._sizes, self._before, strict=True):
            least, most = old * (1 - _MOST_CHANGE), old * (1 + _MOST_CHANGE)
            size.clamp_(least, most).clamp_(1 / _FARTHEST, _FARTHEST)
        for offset, lowest, highest in self._offsets:
            offset.clamp_(lowest, highest)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


class NormsFrozen:
    """Lets batch norms use their running statistics from a step on.

    R. Krishnamoorthi, Quantizing deep convolutional networks for efficient inference, 2018
    (arXiv:1806.08342), section 3.2.2.

    Args:
        graph: the module that executes the graph.
        first: the step.
    """

    def __init__(self, graph: GraphModule, first: int):
        self._graph = graph
        self._first = first

    def before(self, step: int) -> None:
        """Say whether this step's norms are frozen."""
        self._graph.get_buffer(FROZEN).fill_(step >= self._first)

    def after(self, step: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the step says it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""
