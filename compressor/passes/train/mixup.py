"""Mixup: samples of a step are blended in pairs, and so are their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compressor.errors import SpecError
from compressor.types.tensors import TensorSpec, answers

_DRAWN = 0x313  # sets these random numbers apart from those of the transform


@dataclass(frozen=True)
class Mixed:
    """The partners that samples have been blended with.

    Attributes:
        share: of each sample itself, 0 to 1; its partner has the rest.
        partners: the partners' targets, as the samples' are; ``None`` without any.
    """

    share: float
    partners: Tensor | dict[str, Tensor] | None

    def taken(self, choose: Callable[[Tensor], Tensor]) -> Mixed:
        """Return the same for partners that are chosen or moved."""
        partners = self.partners
        if isinstance(partners, dict):
            return Mixed(self.share, {name: choose(tensor) for name, tensor in partners.items()})
        return Mixed(self.share, None if partners is None else choose(partners))


@dataclass(frozen=True)
class Mixup:
    """Blends the samples of a step: H. Zhang et al., mixup, 2018 (arXiv:1710.09412).

    Each sample has another of the same step and process as its partner, and all have one share,
    drawn from a Beta distribution; the loss is blended likewise.

    Attributes:
        alpha: both parameters of the distribution: 0.2 changes most samples little, and 1 draws
            the share evenly.
        inputs: names of the arrays that are blended.
        target: name of the array with the right answers, if there is one.
    """

    alpha: float
    inputs: tuple[str, ...]
    target: str | None

    def of(
        self, tensors: Mapping[str, Tensor], seed: Sequence[int]
    ) -> tuple[dict[str, Tensor], Mixed]:
        """Return a step's tensors with blended inputs, and what they have been blended with.

        Args:
            tensors: ``[N, ...]`` each, by name.
            seed: of the share and the pairs, whole numbers from 0.
        """
        random = np.random.default_rng((*seed, _DRAWN))
        share = float(random.beta(self.alpha, self.alpha))
        samples = len(next(iter(tensors.values())))
        order = torch.from_numpy(random.permutation(samples))
        made = dict(tensors)
        for name in self.inputs:
            made[name] = share * tensors[name] + (1 - share) * tensors[name][order]
        target = None if self.target is None else answers(tensors, self.target)
        return made, Mixed(share, target).taken(lambda tensor: tensor[order])


def mixup_of(alpha: float, inputs: Sequence[TensorSpec], target: str | None) -> Mixup | None:
    """Return how inputs are blended; ``None`` if ``alpha`` is 0.

    Raises:
        SpecError: an input does not hold floats.
    """
    if not alpha:
        return None
    for spec in inputs:
        if not spec.dtype.startswith(("float", "bfloat")):
            raise SpecError(
                "mixup",
                f"is {alpha:g}, but input {spec.name!r} holds {spec.dtype}, which cannot be "
                "blended",
                "leave mixup out",
            )
    return Mixup(alpha, tuple(spec.name for spec in inputs), target)
