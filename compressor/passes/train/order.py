"""In which order samples are seen, and by which process: a function of seed and step alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from compressor.types.training import Rows

_HELD_OUT = 0x5E1D  # tells these random numbers from those of the epochs


@dataclass(frozen=True)
class Order:
    """The samples of each step.

    Every epoch is a permutation of its own. Where the samples do not divide into batches, an
    epoch's last batch is smaller; it is left out where not every process would have a sample of
    it, or where the model takes whole batches only.

    Attributes:
        samples: how many there are.
        batch: how many go into a step, over all processes.
        seed: of the permutations.
        held_out: share of the samples that are never trained on.
        parts: the processes that share a step.
        whole: only batches of full size will do.
    """

    samples: int
    batch: int
    seed: int
    held_out: float = 0.0
    parts: int = 1
    whole: bool = False

    @cached_property
    def _shuffled(self) -> Rows:
        rng = np.random.default_rng((self.seed, _HELD_OUT))
        return rng.permutation(self.samples).astype(np.int64)

    @cached_property
    def validation(self) -> Rows:
        """The samples that are held out, ascending."""
        return np.sort(self._shuffled[: round(self.held_out * self.samples)])

    @cached_property
    def trained(self) -> Rows:
        """The samples that are trained on, ascending."""
        return np.sort(self._shuffled[round(self.held_out * self.samples) :])

    @property
    def steps_in_epoch(self) -> int:
        """How many steps an epoch has."""
        full, rest = divmod(len(self.trained), self.batch)
        return full + (rest >= self.parts and not self.whole and rest > 0)

    def rows(self, step: int) -> Rows:
        """Return the samples of a step, over all processes."""
        epoch, index = divmod(step, self.steps_in_epoch)
        return _permuted(self, epoch)[index * self.batch : (index + 1) * self.batch]

    def part(self, step: int, rank: int) -> Rows:
        """Return one process's samples of a step; sizes differ by one at most."""
        return self.rows(step)[rank :: self.parts]


@lru_cache(maxsize=2)
def _permuted(order: Order, epoch: int) -> Rows:
    return np.random.default_rng((order.seed, epoch)).permutation(order.trained)
