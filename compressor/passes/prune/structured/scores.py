"""Scores of units: by weights, by gradients, by what removing them does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import DataError, ModelError
from compressor.models.element_types import of_numpy, tensor_of
from compressor.models.executor import GraphModule
from compressor.passes.prune import criteria
from compressor.passes.train.losses import signed_sum
from compressor.run.noise.signals import ratio_db
from compressor.types.channels import ChannelGroup, ChannelMap, Flags, Member
from compressor.types.statistics import Request
from compressor.types.tensors import Batch, filled, samples_in

_OBSERVER = "channel-magnitude"
_WEIGHED = ("output", "input", "norm-scale")


def weighed_members(model: ir.Model, groups: Sequence[ChannelGroup]) -> list[list[Member]]:
    """Return for each group the members on which its units' size is measured.

    Weights of the layers that write and read a channel, and the scales of its normalizations.
    Biases and shifts are no part of how strongly a channel depends on its input.
    """
    members = []
    for group in groups:
        weighed = [m for m in group.members if m.role in _WEIGHED]
        matrices = [m for m in weighed if m.role == "norm-scale" or _rank(model, m) > 1]
        members.append(matrices or weighed or list(group.members))
    return members


def _rank(model: ir.Model, member: Member) -> int:
    shape = model.graph.initializers[member.parameter].shape
    return 0 if shape is None else len(shape)


def norm_scales(groups: Sequence[ChannelGroup]) -> list[list[Member]]:
    """Return for each group the scales of its normalizations.

    Z. Liu et al., Learning efficient convolutional networks through network slimming, 2017
    (arXiv:1708.06519), section 3, rank by these alone.
    """
    return [[m for m in group.members if m.role == "norm-scale"] for group in groups]


def magnitude_scores(
    model: ir.Model,
    channels: ChannelMap,
    groups: Sequence[ChannelGroup],
    members: Sequence[Sequence[Member]],
    norm: int,
) -> list[criteria.Scores]:
    """Score units by L1 or L2 norm over some members of their group: ``[n]`` each, with mean 1."""

    @cache
    def sums(member: Member) -> criteria.Scores:
        axis = channels.parameters[member.parameter][member.axis]
        assert axis is not None
        terms = criteria.powers(tensor_of(model.graph.initializers[member.parameter]), norm)
        return criteria.unit_sums(criteria.position_sums(terms, member.axis), axis, channels.count)

    scores = []
    for group, weighed in zip(groups, members, strict=True):
        terms = [sums(m)[group.units] for m in weighed] or [np.zeros(len(group.units))]
        scores.append(criteria.normalized(criteria.magnitude(terms)))
    return scores


def activation_requests(
    channels: ChannelMap, groups: Sequence[ChannelGroup]
) -> tuple[Request, ...]:
    """Ask for the mean magnitudes of all activations on which units of groups lie."""
    prunable = np.zeros(channels.count, dtype=bool)
    for group in groups:
        prunable[group.units] = True
    requests = {}
    for value in channels.activations:
        if prunable[value.units[value.units >= 0]].any():
            request = _request(value.value, value.axis)
            requests[request.key] = request
    return tuple(requests.values())


def _request(value: str, axis: int) -> Request:
    return Request(value, _OBSERVER, {"axis": axis})


def activation_scores(
    channels: ChannelMap, groups: Sequence[ChannelGroup], statistics: Mapping[str, Any]
) -> list[criteria.Scores]:
    """Score by mean absolute activations, averaged over the values on which units lie."""
    means: list[tuple[criteria.Scores, np.ndarray[Any, np.dtype[np.bool_]]]] = []
    for value in channels.activations:
        observed = statistics.get(_request(value.value, value.axis).key)
        if isinstance(observed, torch.Tensor):
            present = np.zeros(channels.count, dtype=bool)
            present[value.units[value.units >= 0]] = True
            means.append(
                (criteria.unit_means(observed.numpy(), value.units, channels.count), present)
            )
    scores = []
    for group in groups:
        averages = [mean[group.units] for mean, present in means if present[group.units].all()]
        scores.append(
            criteria.normalized(criteria.average(averages))
            if averages
            else np.zeros(len(group.units))
        )
    return scores


def random_scores(
    channels: ChannelMap, groups: Sequence[ChannelGroup], seed: int
) -> list[criteria.Scores]:
    """Score at random, as the baseline that a criterion has to beat."""
    drawn = np.random.default_rng(seed).random(channels.count)
    return [drawn[group.units] for group in groups]


SHARES = (0.25, 0.5, 0.75)
"""Shares of a group's units at which it is tried."""
_SHOWN = 5


def solved_counts(queue: criteria.Queue) -> tuple[int, ...]:
    """Return how many units go where layers are solved: by `SHARES`, and as many as can."""
    return (*(min(round(share * len(queue.units)), queue.most) for share in SHARES), queue.most)


@dataclass(frozen=True)
class Sensitivity:
    """What it costs to remove units of one group alone.

    Attributes:
        losses: for each of `SHARES`, power of the outputs' change over that of the outputs; or, if
            layers were solved, variance that is not explained over variance that still is.
        most: the same with as many units gone as can be, if layers were solved.
    """

    name: str
    losses: tuple[float, ...]
    most: float | None = None

    @property
    def sqnr_db(self) -> tuple[float | None, ...]:
        """The same as signal to noise in dB; ``None`` where nothing changed."""
        return tuple(ratio_db(1.0, loss) for loss in self.losses)


def scan(
    masked: Callable[[Flags], Sequence[Batch]],
    queues: Sequence[tuple[str, criteria.Queue]],
    count: int,
) -> tuple[Sensitivity, ...]:
    """Zero the least important units of each group alone and compare the outputs.

    H. Li et al., Pruning filters for efficient ConvNets, 2017 (arXiv:1608.08710), section 3.2,
    find by the same experiment, but measuring accuracy, which layers to prune less.

    ``masked`` returns the outputs with units zeroed, always on the same batches.
    """
    reference = masked(np.zeros(count, dtype=bool))
    costs = []
    for name, queue in queues:
        losses = []
        for share in SHARES:
            flags = np.zeros(count, dtype=bool)
            flags[queue.units[: round(share * len(queue.units))]] = True
            losses.append(relative_error(reference, masked(flags)))
        costs.append(Sensitivity(name, tuple(losses)))
    return tuple(costs)


def relative_error(reference: Sequence[Batch], other: Sequence[Batch]) -> float:
    """Return the power of the difference over that of the reference, the mean over float outputs.

    Outputs that are zero everywhere do not count.

    Args:
        reference: outputs, batch by batch, as ``other``.
    """
    signals, errors = dict[str, float](), dict[str, float]()
    for ours, theirs in zip(reference, other, strict=True):
        for name, array in ours.items():
            if array.dtype.kind != "f":
                continue
            one, two = filled(array, theirs[name])  # the data may decide how many rows there are
            finite = np.isfinite(one) & np.isfinite(two)
            exact = one[finite].astype(np.float64)
            signals[name] = signals.get(name, 0.0) + float(np.square(exact).sum())
            difference = exact - two[finite]
            errors[name] = errors.get(name, 0.0) + float(np.square(difference).sum())
    shares = [errors[name] / signal for name, signal in signals.items() if signal > 0]
    return float(np.mean(shares)) if shares else 0.0


def ranking_note(costs: Sequence[Sensitivity]) -> str:
    """Return which groups cost most and least with half of their units gone."""
    middle = SHARES.index(0.5)
    solved = any(cost.most is not None for cost in costs)
    how = "gone and the layers that read them solved" if solved else "zeroed"
    start = f"signal to noise with half of a group's units {how}"
    ranked = sorted(costs, key=lambda s: -s.losses[middle])

    def shown(part: Sequence[Sensitivity]) -> str:
        levels = ((s.name, s.sqnr_db[middle]) for s in part)
        return ", ".join(f"{n} {'no change' if db is None else f'{db:.1f} dB'}" for n, db in levels)

    if len(ranked) <= 2 * _SHOWN:
        return f"{start}: {shown(ranked)}"
    return (
        f"{start}, most sensitive first: {shown(ranked[:_SHOWN])}; least: {shown(ranked[-_SHOWN:])}"
    )


def output_scores(
    model: ir.Model,
    channels: ChannelMap,
    groups: Sequence[ChannelGroup],
    members: Sequence[Sequence[Member]],
    batches: Iterable[Batch],
    seed: int,
) -> list[criteria.Scores]:
    """Return :func:`taylor_scores` by group, over the mean of all units.

    What the outputs lose compares across groups by itself.
    """
    distinct = list(dict.fromkeys(member for weighed in members for member in weighed))
    whole = criteria.normalized(taylor_scores(model, channels, distinct, batches, seed))
    return [whole[group.units] for group in groups]


def taylor_scores(
    model: ir.Model,
    channels: ChannelMap,
    members: Sequence[Member],
    batches: Iterable[Batch],
    seed: int,
) -> criteria.Scores:
    """Return the expected squared change of the outputs where a unit goes, to first order.

    P. Molchanov et al., Importance estimation for neural network pruning, 2019
    (arXiv:1906.10771), equation 8, take ``(sum of w dL/dw)^2`` over a unit's weights, ``L`` being
    the training loss. That needs labels, and is blind near a minimum. Here ``L = v . f(x)``, the
    outputs times random signs ``v``: its expectation over ``v`` is the sum over all outputs ``f``
    of ``(sum of w df/dw)^2``. Signs differ from sample to sample, so one gradient a batch does for
    all of its samples.

    The result has one score for each unit, the mean over samples.

    Raises:
        ModelError: an operator cannot be differentiated.
        DataError: there are no samples.
    """
    module = GraphModule(model)
    names = list(dict.fromkeys(m.parameter for m in members))
    weights = {n: module.get_buffer(n).detach().clone().requires_grad_() for n in names}
    generator = torch.Generator().manual_seed(seed)
    total, samples = np.zeros(channels.count), 0
    for batch in batches:
        inputs = {n: of_numpy(batch[n].copy()) for n in module.input_names}
        gradients = _gradients(module, inputs, weights, generator)
        change = np.zeros(channels.count)
        for member in members:
            axis = channels.parameters[member.parameter][member.axis]
            gradient = gradients.get(member.parameter)
            if axis is None or gradient is None:
                continue
            products = weights[member.parameter].detach() * gradient
            change += criteria.unit_sums(
                criteria.position_sums(products, member.axis), axis, channels.count
            )
        total += np.square(change)
        samples += samples_in(batch)
    if not samples:
        raise DataError("calibration data", "has no samples", "give at least one batch")
    return total / samples


def _gradients(
    module: GraphModule,
    inputs: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    with torch.enable_grad():
        outputs = [o for o in module(**{**inputs, **weights}).values() if o.requires_grad]
        if not outputs:
            raise ModelError(
                "criterion taylor",
                "finds no output that depends on the weights differentiably",
                "choose another criterion, such as l2",
            )
        total = signed_sum(outputs, generator)
        gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    return {n: g for n, g in zip(weights, gradients, strict=True) if g is not None}
