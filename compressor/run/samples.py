"""The data that a run hands to a pass which runs models of its own making."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.data import Data
from compressor.models.torch.lowering import example_inputs
from compressor.types.tensors import Array, Batch, TensorSpec


def _nothing(done: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class RunSamples:
    """The run's calibration data; see :class:`compressor.types.data.Samples`.

    Attributes:
        inputs: the model's.
        data: the calibration data, if there are any.
        seed: of the batch that is made up where there are none.
        advance: called with how many samples of a pass over the data are done.
    """

    inputs: Sequence[TensorSpec]
    data: Data | None
    seed: int
    advance: Callable[[int], None] = _nothing

    @property
    def made_up(self) -> bool:
        """There are no calibration data."""
        return self.data is None

    def probe(self, count: int) -> Batch:
        """Return the first samples, repeated where the model's batch is fixed and they are few."""
        fixed = self.inputs[0].shape[0]
        wanted = fixed if isinstance(fixed, int) else count
        if self.data is None:
            return made_up_batch(self.inputs, wanted, self.seed)
        batch = self.data.first(wanted)
        names = [i.name for i in self.inputs]
        if not isinstance(fixed, int):
            return {n: batch[n] for n in names}
        repeat = -(-wanted // len(batch[names[0]]))
        return {n: np.concatenate([batch[n]] * repeat)[:wanted] for n in names}

    def batches(self) -> Iterator[Batch]:
        """Yield the calibration data; none where there are none."""
        done = 0
        for batch in () if self.data is None else self.data.batches():
            yield batch
            done += len(next(iter(batch.values())))
            self.advance(done)


def made_up_batch(inputs: Sequence[TensorSpec], count: int, seed: int) -> Batch:
    """Return random inputs: floats of a standard normal distribution, integers 0 and 1.

    Args:
        inputs: the model's; dynamic axes get the lengths that lowering uses, the batch ``count``.
        count: samples, where the model takes any number.
        seed: of the random numbers.
    """
    batch_axis = inputs[0].shape[0] if inputs and inputs[0].shape else None
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for spec, example in zip(inputs, example_inputs(inputs).values(), strict=True):
        shape = [
            count if isinstance(d, str) and d == batch_axis else n
            for d, n in zip(spec.shape, example.shape, strict=True)
        ]
        dtype = np.dtype(spec.dtype)
        values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        made[spec.name] = np.asarray(values).astype(dtype)
    return made
