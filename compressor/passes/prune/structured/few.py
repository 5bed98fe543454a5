"""Calibration samples that are too few for a layer's inputs, and what is added to them.

Of fewer values than inputs, a layer can do without any choice of so many, and solved on these it
may give anything on others. Samples of the same values in an order of their own make inputs that
do not depend on each other, from numbers that the network takes, whatever they mean.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compressor.types.data import Samples
from compressor.types.tensors import Array, Batch, samples_in

ADDED = 64
"""Samples that are added, at least."""


class Shuffled:
    """Calibration data, and then samples whose values are those of one of them, shuffled.

    See :class:`~compressor.types.data.Samples`.
    """

    made_up = False

    def __init__(self, samples: Samples, seed: int):
        self._samples, self._seed = samples, seed

    def probe(self, count: int) -> Batch:
        """Return the first samples, none of them shuffled."""
        return self._samples.probe(count)

    def batches(self) -> Iterator[Batch]:
        """Yield the samples as they are, and then in other orders."""
        yield from self._samples.batches()
        rng, made = np.random.default_rng(self._seed), 0
        while made < ADDED:
            before = made
            for batch in self._samples.batches():
                yield {name: _shuffled(array, rng) for name, array in batch.items()}
                made += samples_in(batch)
            if made == before:
                return


def _shuffled(array: Array, rng: np.random.Generator) -> Array:
    if array.ndim < 2:
        return array
    return rng.permuted(array.reshape(len(array), -1), axis=1).reshape(array.shape)
