"""Zeros that stay zero, and weights that become zero, while a network is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import SpecError
from compressor.passes.prune.criteria import cubic_sparsity
from compressor.passes.prune.magnitude.magnitude import number_of
from compressor.passes.prune.magnitude.ranking import Criterion, scores
from compressor.passes.train.recipe import Gradual
from compressor.types.layers import Layer

_MASK = "mask:"
_START = "start:"


def zero_masks(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return where weights are not zero, for those of which a part is.

    A weight that is zero everywhere was never pruned: it is how some layers begin.

    Args:
        module: the network.
        names: the parameters that are looked at.
    """
    found = {}
    parameters = dict(module.named_parameters())
    for name in names:
        alive = parameters[name].detach() != 0
        if not alive.all() and alive.any():
            found[name] = alive
    return found


class ZerosKept:
    """Makes what was zero before a training zero after each of its steps.

    Args:
        module: the network.
        names: parameters that may hold pruned weights.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]):
        self._parameters = dict(module.named_parameters())
        self._masks = zero_masks(module, names)

    @property
    def masked(self) -> tuple[str, ...]:
        """Names of the parameters that have zeros to keep."""
        return tuple(self._masks)

    def before(self, step: int) -> None:
        """Do nothing."""

    @torch.no_grad()
    def after(self, step: int) -> None:  # noqa: ARG002
        """Make the zeros zero again: momentum and weight decay move them, too."""
        for name, mask in self._masks.items():
            apply_mask(self._parameters[name], mask, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks."""
        return {_MASK + name: mask for name, mask in self._masks.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the masks of the interrupted training."""
        self._masks = {name.removeprefix(_MASK): mask for name, mask in state.items()}


def apply_mask(parameter: nn.Parameter, mask: Tensor, name: str) -> None:
    """Zero a parameter where a mask is false, in place.

    Raises:
        SpecError: the parameter has another shape here, since it is spread over processes.
    """
    if parameter.shape != mask.shape:
        raise SpecError(
            f"parameter {name!r}",
            "is spread over processes, and so cannot be masked",
            "train pruned networks without FSDP",
        )
    parameter.mul_(mask.to(parameter.device))


@dataclass(frozen=True)
class Span:
    """The steps of gradual pruning.

    Attributes:
        begin: the step with the first pruning.
        end: the step with the last one.
    """

    begin: int
    end: int


class GradualPruning:
    """Zeroes ever more weights of least magnitude while they are trained.

    The share follows M. Zhu and S. Gupta, To prune, or not to prune, 2017 (arXiv:1710.01878),
    section 3. Going back to early values: J. Frankle and M. Carbin, The lottery ticket hypothesis,
    2019 (arXiv:1803.03635), and J. Frankle et al., 2020 (arXiv:1912.05671), who go back to a step
    after the first.

    Args:
        module: the network.
        layers: those that lose weights, by the parameter that is their weight.
        options: how much, when and which.
        steps: of the training.
    """

    def __init__(
        self, module: nn.Module, layers: Mapping[str, Layer], options: Gradual, steps: int
    ):
        self._parameters = dict(module.named_parameters())
        self._layers = layers
        self._options = options
        self._span = Span(round(options.begin * steps), max(1, round(options.end * steps) - 1))
        self._masks: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}

    def before(self, step: int) -> None:
        """Keep the values to go back to."""
        if step == self._options.rewind:
            self._start = {n: p.detach().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Prune where it is due, and make zero what was pruned."""
        begin, end = self._span.begin, self._span.end
        if begin <= step <= end and ((step - begin) % self._options.every == 0 or step == end):
            self._prune(cubic_sparsity(step + 1, begin, end + 1, self._options.target))
        if step == end:
            self._go_back()
        for name, mask in self._masks.items():
            apply_mask(self._parameters[name], mask, name)

    def _prune(self, share: float) -> None:
        if self._options.scope == "local":
            for name in self._layers:
                self._cut([name], share)
        else:
            self._cut(list(self._layers), share)

    def _cut(self, names: Sequence[str], share: float) -> None:
        """Zero a share of the units of some layers together."""
        height, width = self._options.block
        criterion = Criterion("l1", (height, width))
        found = []
        for name in names:
            units, shift = scores(self._matrix(name), criterion)
            found.append(units.to(torch.int64).flatten() << shift)
        every = torch.cat(found)
        gone = torch.zeros(len(every), dtype=torch.bool, device=every.device)
        number = number_of(share, len(every))
        gone[torch.argsort(every, stable=True)[:number]] = True
        for name, part in zip(names, torch.split(gone, [len(f) for f in found]), strict=True):
            layer = self._layers[name]
            blocks = part.reshape(layer.rows // height, layer.columns // width)
            matrix = blocks.repeat_interleave(height, 0).repeat_interleave(width, 1)
            self._masks[name] = ~layer.stored(matrix)

    def _matrix(self, name: str) -> Tensor:
        return self._layers[name].canonical(self._parameters[name].detach())

    def _go_back(self) -> None:
        for name, value in self._start.items():
            self._parameters[name].copy_(value)
        self._start = {}

    def state_dict(self) -> dict[str, Any]:
        """Return masks, and the values to go back to."""
        masks = {_MASK + name: mask for name, mask in self._masks.items()}
        return masks | {_START + name: value for name, value in self._start.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what the interrupted training had."""
        self._masks = {n.removeprefix(_MASK): t for n, t in state.items() if n.startswith(_MASK)}
        self._start = {n.removeprefix(_START): t for n, t in state.items() if n.startswith(_START)}
