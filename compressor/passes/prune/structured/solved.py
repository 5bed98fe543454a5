"""What the outputs lose by a removal, with the layers that read what is gone solved again.

A layer of which few inputs are needed looks dear as long as the others are only zeroed: their mean
is missing, and what they share with those that stay. So each layer is given the weight that comes
nearest to its own outputs without them, in closed form from the moments of the inputs that it has
in the whole model. The model is run with these weights, and its outputs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import numpy as np
import torch

from compressor.graph.output_parts import named_parts, output_parts
from compressor.models.element_types import tensor_of
from compressor.passes.prune.criteria import Queue
from compressor.passes.prune.maths.least_squares import Start, Sums, without_columns
from compressor.passes.prune.structured.consumers import Consumer, possible_consumers
from compressor.passes.prune.structured.dropped import WithoutBlocks
from compressor.passes.prune.structured.moments import (
    AT_ONCE,
    Moments,
    moment_bytes,
    owners,
    portions,
    readers_of,
)
from compressor.passes.prune.structured.recent import Recent
from compressor.passes.prune.structured.removal import GatedModel
from compressor.passes.prune.structured.scores import Sensitivity, solved_counts
from compressor.passes.prune.structured.segments import Variant
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap, Flags
from compressor.types.data import Samples
from compressor.types.tensors import Array, Batch, filled, picked, samples_in

_CONSTANT = 1e-9  # share of an output's power around its mean up to which it is taken not to vary
# Of twice as many samples, ResNet-20 keeps as much at half of the work; of 8, a point less.
_LEAST_SAMPLES, _MOST_SAMPLES = 8, 32
_WORK = 2e9  # multiply-accumulates for each loss
_LEAST_EXPLAINED = 0.05  # of an output's variance; what explains less is as bad as that


class SolvedModel:
    """A model that runs without any variant, the layers that read it solved.

    Args:
        groups: those of which units may go.
        blocks: residual blocks that may be dropped.
        moments: sums over what layers read on the calibration data.
        without: what makes up for dropped blocks; they are zeroed alone if it is left out.
    """

    def __init__(
        self,
        carrier: Carrier,
        channels: ChannelMap,
        groups: Sequence[ChannelGroup],
        model: Callable[[Sequence[str]], GatedModel],
        moments: Moments,
        without: WithoutBlocks | None = None,
    ):
        self._carrier, self._channels, self._groups = carrier, channels, groups
        self._consumers, _ = possible_consumers(carrier, groups)
        self._sums, self._without = moments, without
        shifts = [c.shift.parameter for c in self._consumers if c.shift is not None]
        self._model = model([*shifts, *(without.names if without is not None else ())])
        self._known = Recent()

    def run(self, batch: Batch, variant: Variant) -> Batch:
        """Run one batch without what a variant takes away."""
        return self._model.run(batch, variant, self.changes(variant))

    def changes(self, variant: Variant) -> Batch:
        """Return the parameters that make up for dropped blocks, and for removed units."""
        changes: Batch = {}
        if self._without is not None:
            changes = self._without.changes(variant.dropped)
        for consumer, units, sums in self._moments:
            gone = np.append(variant.removed, False)[units]  # the last for columns without a unit
            if not gone.any():
                continue
            without = None
            if self._without is not None:
                without = self._without.behind(consumer.layer.weight, variant.dropped)
            key = (consumer.layer.name, without, np.packbits(gone).tobytes())
            make = partial(self._solved, consumer, sums, gone, changes)
            changes = changes | self._known.of(key, make)
        return changes

    @cached_property
    def _moments(self) -> list[tuple[Consumer, Array, Sums]]:
        """The layers that can be solved, the units that their columns read, and their inputs."""
        found = []
        for start, end in portions([moment_bytes(c) for c in self._consumers]):
            part = self._consumers[start:end]
            sums = self._sums.of(part)
            for c in part:
                units = owners(self._channels, self._groups, c)
                found.append((c, units.numpy(), sums[c.layer.name]))
        return found

    def _solved(self, c: Consumer, sums: Sums, gone: Flags, given: Batch) -> Batch:
        old = self._parameter(c.layer.weight, given)
        weight = c.layer.canonical(old).to(torch.float64)
        start = Start(
            weight, torch.zeros(len(weight), dtype=torch.float64), c.shift is not None, c.scale()
        )
        found, bias = without_columns(start, sums, torch.from_numpy(gone))
        changes = {c.layer.weight: c.layer.stored(found).to(old.dtype).numpy()}
        if c.shift is not None:
            held = self._parameter(c.shift.parameter, given)
            moved = held.to(torch.float64) + c.shift.sign * bias
            changes[c.shift.parameter] = moved.to(held.dtype).numpy()
        return changes

    def _parameter(self, name: str, given: Batch) -> torch.Tensor:
        if name in given:
            return torch.from_numpy(given[name])
        return tensor_of(self._carrier.graph().graph.initializers[name])


class OutputLoss:
    """How much of what a model's outputs tell of its inputs is lost.

    Of each output, the variance over samples that is not explained any more, as a share of the
    variance that still is: the inverse of Cohen's f² (Statistical power analysis, 1988, section
    9.2). An output's constant part, such as the background of a detector's scores, does not
    count. Small losses of several layers add up, and one that leaves nothing to explain has no
    bound, as it is to be where losses are traded for each other.

    Args:
        reference: the float model's outputs, batch by batch.
    """

    def __init__(self, reference: Sequence[Batch]):
        self._reference = [
            [a.astype(np.float64) for a in batch.values() if a.dtype.kind == "f"]
            for batch in reference
        ]
        self._variances = [_variance(arrays) for arrays in zip(*self._reference, strict=True)]

    def __call__(self, outputs: Iterable[Batch]) -> float:
        """Return the mean over outputs; they pair by position, and rows beyond count as zeros."""
        errors = np.zeros(len(self._variances))
        for ours, found in zip(self._reference, outputs, strict=True):
            theirs = [a for a in found.values() if a.dtype.kind == "f"]
            for place, (exact, other) in enumerate(zip(ours, theirs, strict=True)):
                one, two = filled(exact, other)  # the data may decide how many rows there are
                errors[place] += _power(one - two)
        lost = [e / v for e, v in zip(errors, self._variances, strict=True) if v > 0]
        return float(np.mean([e / max(1 - e, _LEAST_EXPLAINED) for e in lost])) if lost else 0.0


def solved_losses(
    carrier: Carrier,
    channels: ChannelMap,
    groups: Sequence[ChannelGroup],
    queues: Sequence[Queue],
    samples: Samples,
    moments: Moments,
) -> tuple[Sensitivity, ...]:
    """Remove the least important units of each group alone, solve what reads them, and compare.

    Groups are looked at in portions, so that memory holds the moments of a few layers. Of one with
    more of them than that, units are only zeroed: the loss of its channels is overestimated.

    Args:
        queues: of each group.
        samples: losses are measured on :func:`loss_samples` of them.
        moments: sums over what layers read.
    """
    parts, runner = output_parts(carrier.graph()), carrier.runner()
    batches = first_batches(samples, loss_samples(channels))
    loss = OutputLoss([named_parts(runner.run(batch), parts) for batch in batches])

    def gated(others: Sequence[str]) -> GatedModel:
        return GatedModel(carrier, channels, (), others=others)

    consumers, _ = possible_consumers(carrier, groups)
    sizes = [sum(map(moment_bytes, part)) for part in readers_of(groups, consumers)]
    found = []
    for start, end in portions(sizes):
        own = [groups[i] for i in range(start, end) if sizes[i] <= AT_ONCE]
        model = SolvedModel(carrier, channels, own, gated, moments)
        for group, queue in zip(groups[start:end], queues[start:end], strict=True):
            losses = []
            for gone in solved_counts(queue):
                removed = np.zeros(channels.count, dtype=bool)
                removed[queue.units[:gone]] = True
                outputs = (model.run(batch, Variant(removed)) for batch in batches)
                losses.append(loss(named_parts(output, parts) for output in outputs))
            found.append(Sensitivity(group.name, tuple(losses[:-1]), losses[-1]))
    return tuple(found)


def _variance(arrays: Sequence[Array]) -> float:
    """Return the power of an output around its mean over samples; around zero if that is none."""
    power = sum(_power(array) for array in arrays)
    if len({a.shape[1:] for a in arrays}) > 1 or arrays[0].ndim == 0:
        return power
    joined = np.concatenate(arrays)
    varied = _power(joined - joined.mean(0))
    return varied if varied > _CONSTANT * power else power


def _power(array: Array) -> float:
    return float(np.square(array[np.isfinite(array)]).sum())


def loss_samples(channels: ChannelMap) -> int:
    """Return how many samples a loss is measured on: fewer where each takes much work."""
    work = max(channels.macs(np.zeros(channels.count, dtype=bool)), 1)
    return int(np.clip(_WORK / work, _LEAST_SAMPLES, _MOST_SAMPLES))


def first_batches(samples: Samples, count: int) -> list[Batch]:
    """Return about so many first samples: as one batch, or in batches of the size that is fixed."""
    probe = samples.probe(count)
    if samples.made_up or samples_in(probe) >= count:
        return [probe]
    found, held = list[Batch](), 0
    for batch in samples.batches():
        found.append(picked(batch, probe))
        held += samples_in(batch)
        if held >= count:
            break
    return found or [probe]
