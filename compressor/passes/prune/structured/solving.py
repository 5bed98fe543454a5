"""A layer while it is solved: its moments, and what was seen of it for another round.

Where an activation clips a layer's outputs, it is solved several times, each time for other
targets. What it reads is the same then, so that it is kept where memory allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from compressor.passes.prune.maths.least_squares import (
    Fit,
    Start,
    Sums,
    clipped_targets,
    solved_again,
)
from compressor.passes.prune.structured.consumers import Bounds, Consumer
from compressor.passes.prune.structured.counterparts import Ends

FOLDS = 2
"""Parts of the samples; a layer is judged on those that it was not solved on."""

_GAIN = 0.02  # share of its error that another round must have gained


class Seen(NamedTuple):
    """A batch at a layer, ``[batch, places, n]``; none of it depends on how the layer is solved.

    Attributes:
        inputs: what the layer reads.
        target: what it is to give.
        beside: what is added to that before an activation.
    """

    inputs: Tensor
    target: Tensor
    beside: Tensor

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(tensor.nbytes for tensor in self)


@dataclass(eq=False)
class Task:
    """A layer while it is solved.

    Attributes:
        held: what was seen of it, by batch; ``None`` where that is too much to be kept.
    """

    layer: Consumer
    ends: Ends
    scale: Tensor
    offset: Tensor
    start: Start
    fit: Fit | None = None
    sums: list[Sums] = field(init=False)
    held: list[tuple[Seen, int]] | None = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        layer = self.layer.layer
        self.sums = [Sums(layer.columns, layer.rows, layer.groups) for _ in range(FOLDS)]

    @property
    def bounds(self) -> Bounds | None:
        """Those of the activation behind it, if all that is added before is known."""
        known = self.layer.beside is None or self.ends.beside
        return self.layer.bounds if known else None

    @property
    def clips(self) -> bool:
        """Whether it was solved, and not all that is left of its error may make a difference."""
        return self.bounds is not None and self.fit is not None and self.fit.penalty is not None

    def hold(self, seen: Seen, number: int, most: int) -> int:
        """Keep what was seen for other targets, if it takes at most these bytes; return them."""
        if self.held is None or self.bounds is None:
            return 0
        if seen.bytes > most:
            freed, self.held = sum(kept.bytes for kept, _ in self.held), None
            return -freed
        self.held.append((seen, number))
        return seen.bytes

    def add(self, seen: Seen, number: int) -> None:
        """Add one half of a batch's samples to either part; a single sample by turns."""
        inputs, target = seen.inputs, self._aim(seen)
        half = len(inputs) // 2
        for fold, part in enumerate((slice(None, half), slice(half, None))):
            sums = self.sums[(fold + number) % FOLDS]
            sums.add(inputs[part].flatten(0, 1), target[part].flatten(0, 1))

    def _aim(self, seen: Seen) -> Tensor:
        """Return the target, or what is as good behind the activation."""
        if self.fit is None or self.bounds is None:
            return seen.target
        inputs, kind = seen.inputs, seen.inputs.dtype
        weight, groups = self.fit.weight.to(kind), self.layer.layer.groups
        if groups == 1:
            now = inputs @ weight.T
        else:
            parts = (
                torch.unflatten(inputs, -1, (groups, -1)),
                torch.unflatten(weight, 0, (groups, -1)),
            )
            now = torch.einsum("...gc,grc->...gr", *parts).flatten(-2)
        now = now + self.fit.bias.to(kind)
        offset = self.offset.to(kind) + seen.beside
        return clipped_targets(seen.target, now, self.scale.to(kind), offset, *self.bounds)

    def improved(self) -> bool:
        """Solve again, if that is better; return whether it was so by enough to go on."""
        assert self.fit is not None
        before, self.fit = self.fit, solved_again(self.start, self.sums, self.fit)
        return self.fit.after < (1 - _GAIN) * before.after
