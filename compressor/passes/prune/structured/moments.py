"""Second moments of what layers read, of all calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch

from compressor.passes.prune.maths.least_squares import Sums
from compressor.passes.prune.maths.places import pairs
from compressor.passes.prune.structured.consumers import Consumer
from compressor.passes.prune.structured.shuffled import ADDED
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap
from compressor.types.tensors import Array, Batch, samples_in

AT_ONCE = 256 << 20  # bytes of moments; more only if a single part has more
_PLACES = 64  # of a feature map or a sequence that are looked at in each sample at least
_ROWS_PER_COLUMN = 16  # of all samples together, if they have as many places
_ROWS = 1 << 15  # of all samples together at least: of few samples, all places tell something
_DOUBLE = 8  # bytes
_PAIRS = 4  # for each input, from which on they tell; many of them are alike, as neighbours are


def moment_bytes(consumer: Consumer) -> int:
    """Return what the moment of a layer's inputs takes in memory."""
    return _DOUBLE * consumer.layer.columns**2


def readers_of(
    groups: Sequence[ChannelGroup], consumers: Sequence[Consumer]
) -> list[list[Consumer]]:
    """Return for each group the layers that read its units, of those that are given."""
    by_weight = {c.layer.weight: c for c in consumers}
    return [
        list(
            dict.fromkeys(
                by_weight[m.parameter]
                for m in group.members
                if m.role == "input" and m.parameter in by_weight
            )
        )
        for group in groups
    ]


def portions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the end of parts that fit into memory together."""
    start = held = 0
    for index, size in enumerate(sizes):
        if index > start and held + size > AT_ONCE:
            yield start, index
            start, held = index, 0
        held += size
    if len(sizes) > start:
        yield start, len(sizes)


def rows_of(columns: int) -> int:
    """Return how many pairs of all samples are looked at for so many columns."""
    return max(_ROWS, _ROWS_PER_COLUMN * columns)


def places_of(columns: int, samples: int) -> int:
    """Return at how many places of each of so many samples a layer is looked at."""
    return max(_PLACES, -(-rows_of(columns) // max(samples, 1)))


def gathered(
    carrier: Carrier,
    consumers: Sequence[Consumer],
    batches: Callable[[], Iterable[Batch]],
    samples: int,
) -> dict[str, Sums]:
    """Return sums over what layers read in so many samples, by layer name, without targets.

    Layers that read the same share theirs.
    """
    if not consumers:
        return {}
    names = dict.fromkeys(n for c in consumers for n in (c.input, c.layer.output))
    given = {spec.name for spec in carrier.inputs}
    runner = carrier.runner([name for name in names if name not in given])
    read = {c.layer.name: (c.input, c.window, c.layer.columns) for c in consumers}
    one_of = {read[c.layer.name]: c for c in consumers}
    sums = {key: Sums(c.layer.columns, 0) for key, c in one_of.items()}
    for batch in batches():
        values = {**batch, **runner.run(batch)}
        for key, c in one_of.items():
            inputs, outputs = (_tensor(values[name]) for name in (c.input, c.layer.output))
            seen, _ = pairs(inputs, [outputs], c.window, places_of(c.layer.columns, samples))
            flat = seen.flatten(0, 1)
            sums[key].add(flat, flat[:, :0])
    return {name: sums[key] for name, key in read.items()}


def tells(sums: Sums) -> bool:
    """Whether sums say what a layer loses without some inputs: they are of enough pairs.

    Of fewer pairs than inputs, some inputs are given by the others, and by any choice of so many:
    nothing would be lost, on these samples. Of not many more, little is.
    """
    return sums.count >= _PAIRS * len(sums.input_sum)


class Moments:
    """Sums over what layers of a model read, of which those looked at last are kept.

    Args:
        batches: returns the calibration data.

    """

    def __init__(self, carrier: Carrier, batches: Callable[[], Iterable[Batch]]):
        self._carrier, self._batches = carrier, batches
        self._kept: dict[str, Sums] = {}
        self._bytes = 0
        self._told: dict[str, bool] = {}

    @cached_property
    def _samples(self) -> int:
        return sum(map(samples_in, self._batches()))

    def of(self, consumers: Sequence[Consumer]) -> dict[str, Sums]:
        """Return sums by layer name; the data are read if any are missing."""
        missing = [c for c in consumers if c.layer.name not in self._kept]
        size = sum(map(moment_bytes, missing))
        found = {c.layer.name: self._kept[c.layer.name] for c in consumers if c not in missing}
        if self._bytes + size > AT_ONCE:
            self._kept, self._bytes = {}, 0
        new = gathered(self._carrier, missing, self._batches, self._samples)
        self._told |= {name: tells(sums) for name, sums in new.items()}
        self._kept |= new
        self._bytes += size
        return found | new

    @property
    def few(self) -> bool:
        """Whether most layers that were looked at read too little; see :func:`tells`."""
        return 2 * sum(self._told.values()) < len(self._told)

    def note(self, *, added: bool) -> str:
        """Return in a sentence that most layers read too little, and whether samples are added."""
        untold = [name for name, told in self._told.items() if not told]
        done = f": so at least {ADDED} samples of the same values in other orders were added"
        return (
            f"the calibration samples show {len(untold)} of {len(self._told)} layers, such as "
            f"{untold[0]!r}, fewer than {_PAIRS} values for each input, too few to tell what can "
            f"go{done if added else ''}. Give more samples"
        )


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float32))


def owners(channels: ChannelMap, groups: Sequence[ChannelGroup], c: Consumer) -> torch.Tensor:
    """Return the unit that each column of a layer's weight reads, ``[columns]``; -1 for none."""
    axis = next(
        m.axis
        for group in groups
        for m in group.members
        if m.role == "input" and m.parameter == c.layer.weight
    )
    units = channels.parameters[c.layer.weight][axis]
    assert units is not None
    shape = [-1 if index == axis else 1 for index in range(len(c.layer.shape))]
    spread = torch.from_numpy(np.array(units)).reshape(shape).expand(c.layer.shape)
    return c.layer.canonical(spread)[0]
