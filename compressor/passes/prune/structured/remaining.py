"""Score units by the error that remains, in the layers that read them, once these are solved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from compressor.models.element_types import from_numpy
from compressor.passes.prune.criteria import Scores
from compressor.passes.prune.maths.elimination import Reader, eliminate
from compressor.passes.prune.maths.least_squares import Sums, pairs
from compressor.passes.prune.structured.consumers import Consumer, possible_consumers
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap
from compressor.types.tensors import Array, Batch

_PLACES = 64  # of a feature map or a sequence that are looked at in each sample
_AT_ONCE = 256 << 20  # bytes of moments; more only if a single group has more
_DOUBLE = 8  # bytes


def remaining_scores(
    carrier: Carrier,
    channels: ChannelMap,
    groups: Sequence[ChannelGroup],
    batches: Callable[[], Iterable[Batch]],
    plain: Sequence[Scores],
) -> list[Scores]:
    """Return for each group the loss at which each unit goes.

    Groups are looked at in portions, so that memory holds the moments of a few layers; the data
    are read once for each portion.

    Args:
        plain: scores of groups of which no reader can be solved.
    """
    consumers, _ = possible_consumers(carrier, groups)
    by_weight = {c.layer.weight: c for c in consumers}
    readers = [
        list(
            dict.fromkeys(
                by_weight[m.parameter]
                for m in group.members
                if m.role == "input" and m.parameter in by_weight
            )
        )
        for group in groups
    ]
    scores: list[Scores] = []
    for start, end in _portions([sum(map(_bytes, part)) for part in readers]):
        wanted = list(dict.fromkeys(c for part in readers[start:end] for c in part))
        sums = _gathered(carrier, wanted, batches()) if wanted else {}
        for group, part, other in zip(
            groups[start:end], readers[start:end], plain[start:end], strict=True
        ):
            read = [_reader(carrier, channels, group, c, sums[c.layer.name]) for c in part]
            scores.append(_scored(read, len(group.units)) if read else other)
    return scores


def _bytes(consumer: Consumer) -> int:
    return _DOUBLE * consumer.layer.columns**2


def _portions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the end of groups that fit into memory together."""
    start = held = 0
    for index, size in enumerate(sizes):
        if index > start and held + size > _AT_ONCE:
            yield start, index
            start, held = index, 0
        held += size
    if len(sizes) > start:
        yield start, len(sizes)


def _gathered(
    carrier: Carrier, consumers: Sequence[Consumer], batches: Iterable[Batch]
) -> dict[str, Sums]:
    names = dict.fromkeys(n for c in consumers for n in (c.input, c.layer.output))
    given = {spec.name for spec in carrier.inputs}
    runner = carrier.runner([name for name in names if name not in given])
    sums = {c.layer.name: Sums(c.layer.columns, 0) for c in consumers}
    for batch in batches:
        values = {**batch, **runner.run(batch)}
        for c in consumers:
            inputs, outputs = (_tensor(values[name]) for name in (c.input, c.layer.output))
            seen, _ = pairs(inputs, [outputs], c.window, _PLACES)
            flat = seen.flatten(0, 1)
            sums[c.layer.name].add(flat, flat[:, :0])
    return sums


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float32))


def _reader(
    carrier: Carrier, channels: ChannelMap, group: ChannelGroup, c: Consumer, sums: Sums
) -> Reader:
    """Return a layer's weight, the moment of what it reads, and whose its columns are."""
    places = np.full(channels.count + 1, -1)  # the last for positions without a unit
    places[group.units] = np.arange(len(group.units))
    axis = next(
        m.axis for m in group.members if m.role == "input" and m.parameter == c.layer.weight
    )
    units = channels.parameters[c.layer.weight][axis]
    assert units is not None
    owners = torch.from_numpy(places[units])
    shape = [-1 if index == axis else 1 for index in range(len(c.layer.shape))]
    spread = c.layer.canonical(owners.reshape(shape).expand(c.layer.shape))[0]
    moment = sums.inputs
    if c.shift is not None:
        moment = moment - torch.outer(sums.input_sum, sums.input_sum) / max(sums.count, 1)
    stored = carrier.graph().graph.initializers[c.layer.weight].const_value
    assert stored is not None
    weight = c.layer.canonical(from_numpy(stored)).to(torch.float64)
    return Reader(weight * c.scale()[:, None], moment, spread)


def _scored(readers: Sequence[Reader], units: int) -> Scores:
    order, losses = eliminate(readers, units)
    # Where two lose the same, the order still holds.
    rising = np.array(losses) + np.arange(units) * (1e-12 * (losses[-1] or 1.0))
    scores = np.zeros(units)
    scores[order] = rising
    return scores
