"""Samples that are added where calibration data are too few for a layer's inputs.

A layer that sees fewer values than it has inputs seems to need only some of them, whichever these
are, and a weight solved on these values may be wrong for all others. Samples with the same values
in another order give it inputs that do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compressor.types.data import Samples
from compressor.types.tensors import Array, Batch, samples_in

ADDED = 64
"""Samples that are added, at least."""
_PLACES = 3  # axes from which on an input has its values at several places


class Shuffled:
    """Calibration data, and then samples whose floats are those of one of them, shuffled.

    Only floats ``[samples, ..., ...]`` are shuffled. Whole numbers may be indices, each of a table
    of its own, and columns of floats may be quantities in units of their own.

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


def with_shuffled(samples: Samples, seed: int) -> tuple[Samples, bool]:
    """Return samples with others of their values, and whether they have any to shuffle."""
    adds = any(map(_is_shuffled, samples.probe(1).values()))
    return (Shuffled(samples, seed) if adds else samples), adds


def _is_shuffled(array: Array) -> bool:
    return array.ndim >= _PLACES and np.issubdtype(array.dtype, np.floating)


def _shuffled(array: Array, rng: np.random.Generator) -> Array:
    if not _is_shuffled(array):
        return array
    return rng.permuted(array.reshape(len(array), -1), axis=1).reshape(array.shape)
