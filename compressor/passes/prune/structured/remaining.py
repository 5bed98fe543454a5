"""Score units by the error that remains, in the layers that read them, once these are solved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import torch

from compressor.models.element_types import tensor_of
from compressor.passes.prune.criteria import Scores
from compressor.passes.prune.maths.elimination import Reader, eliminate
from compressor.passes.prune.maths.least_squares import Sums
from compressor.passes.prune.structured.consumers import Consumer, possible_consumers
from compressor.passes.prune.structured.moments import (
    Moments,
    moment_bytes,
    owners,
    portions,
    readers_of,
)
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap

QUICK = 2.0**34
"""Cubes of columns that take about two seconds: 2,580 columns of one layer.

Elimination inverts a matrix of all columns, and updates it as often as units go, up to a bound.
"""


def remaining_scores(
    carrier: Carrier,
    channels: ChannelMap,
    groups: Sequence[ChannelGroup],
    moments: Moments,
    plain: Sequence[Scores],
    most: float = inf,
) -> list[Scores]:
    """Return for each group the loss at which each unit goes.

    Groups are looked at in portions, so that memory holds the moments of a few layers; the data
    are read once for each portion.

    Args:
        plain: scores of groups of which no reader can be solved, or that take too long.
        most: cubes of columns of a group's readers, added up, beyond which it takes too long.
    """
    consumers, _ = possible_consumers(carrier, groups)
    read_by = [
        part if sum(c.layer.columns**3 for c in part) <= most else []
        for part in readers_of(groups, consumers)
    ]
    scores: list[Scores] = []
    for start, end in portions([sum(map(moment_bytes, part)) for part in read_by]):
        wanted = list(dict.fromkeys(c for part in read_by[start:end] for c in part))
        sums = moments.of(wanted)
        for group, part, other in zip(
            groups[start:end], read_by[start:end], plain[start:end], strict=True
        ):
            read = _readers(carrier, channels, group, [(c, sums[c.layer.name]) for c in part])
            scores.append(_scored(read, len(group.units)) if read else other)
    return scores


def _readers(
    carrier: Carrier,
    channels: ChannelMap,
    group: ChannelGroup,
    consumers: Sequence[tuple[Consumer, Sums]],
) -> list[Reader]:
    """Return layers' weights, the moments of what they read, and whose their columns are."""
    places = np.full(channels.count + 1, -1)  # the last for columns without a unit
    places[group.units] = np.arange(len(group.units))
    alike: dict[tuple[int, bool, bytes], Reader] = {}
    for c, sums in consumers:
        stored = tensor_of(carrier.graph().graph.initializers[c.layer.weight])
        weight = c.layer.canonical(stored).to(torch.float64) * c.scale()[:, None]
        spread = places[owners(channels, [group], c).numpy()]
        key = (id(sums), c.shift is not None, spread.tobytes())
        if (same := alike.get(key)) is not None:
            alike[key] = replace(same, weights=(*same.weights, weight))
            continue
        moment = sums.inputs
        if c.shift is not None:
            moment = moment - torch.outer(sums.input_sum, sums.input_sum) / max(sums.count, 1)
        alike[key] = Reader((weight,), moment, torch.from_numpy(spread))
    return list(alike.values())


def _scored(readers: Sequence[Reader], units: int) -> Scores:
    order, losses = eliminate(readers, units)
    # Where two lose the same, the order still holds.
    rising = np.array(losses) + np.arange(units) * (1e-12 * (losses[-1] or 1.0))
    scores = np.zeros(units)
    scores[order] = rising
    return scores
