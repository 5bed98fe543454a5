"""Scores of the units of a model's groups, by criterion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compressor.models.executor.convert import from_numpy
from compressor.passes.prune.criteria import (
    Scores,
    average,
    magnitude,
    normalized,
    position_sums,
    powers,
    unit_means,
    unit_sums,
)
from compressor.types.channels import ChannelGroup, ChannelMap, Member
from compressor.types.statistics import Request

_OBSERVER = "channel-magnitude"
_WEIGHED = ("output", "input", "norm-scale")


def weighed_members(model: ir.Model, groups: Sequence[ChannelGroup]) -> list[list[Member]]:
    """Return for each group what its units' size is measured on.

    Weights of the layers that write and read a channel, and the scales of its normalizations.
    Biases and shifts are no part of how strongly a channel depends on its input.
    """
    found = []
    for group in groups:
        own = [m for m in group.members if m.role in _WEIGHED]
        matrices = [m for m in own if m.role == "norm-scale" or _rank(model, m) > 1]
        found.append(matrices or own or list(group.members))
    return found


def _rank(model: ir.Model, member: Member) -> int:
    shape = model.graph.initializers[member.parameter].shape
    return 0 if shape is None else len(shape)


def magnitude_scores(
    model: ir.Model, channels: ChannelMap, groups: Sequence[ChannelGroup], norm: int
) -> list[Scores]:
    """Score by L1 or L2 norm over all members of a group.

    Args:
        model: holds the weights.
        channels: the model's.
        groups: those to score.
        norm: 1 or 2.

    Returns:
        For each group the scores of its units, ``[n]``, with mean 1.
    """
    terms = MemberSums(model, channels, norm)
    found = []
    for group, members in zip(groups, weighed_members(model, groups), strict=True):
        own = [terms.of(m)[group.units] for m in members] or [np.zeros(len(group.units))]
        found.append(normalized(magnitude(own)))
    return found


def norm_scale_scores(
    model: ir.Model, channels: ChannelMap, groups: Sequence[ChannelGroup]
) -> list[Scores]:
    """Score by the absolute scales of normalizations.

    Z. Liu et al., Learning efficient convolutional networks through network slimming, 2017
    (arXiv:1708.06519), section 3. Where several normalize a group, their mean counts.
    """
    terms = MemberSums(model, channels, 1)
    found = []
    for group in groups:
        scales = [m for m in group.members if m.role == "norm-scale"]
        found.append(normalized(magnitude([terms.of(m)[group.units] for m in scales])))
    return found


class MemberSums:
    """Sums of weights' powers for each unit, found once for each axis of each parameter.

    Args:
        model: holds the weights.
        channels: the model's.
        norm: 1 or 2.
    """

    def __init__(self, model: ir.Model, channels: ChannelMap, norm: int):
        self._model = model
        self._channels = channels
        self._norm = norm
        self._known: dict[tuple[str, int], Scores] = {}

    def of(self, member: Member) -> Scores:
        """Return the sums over a member, ``[units of the model]``."""
        key = (member.parameter, member.axis)
        if key not in self._known:
            axis = self._channels.parameters[member.parameter][member.axis]
            assert axis is not None
            tensor = self._model.graph.initializers[member.parameter].const_value
            assert tensor is not None
            positions = position_sums(powers(from_numpy(tensor), self._norm), member.axis)
            self._known[key] = unit_sums(positions, axis, self._channels.count)
        return self._known[key]


def activation_requests(
    channels: ChannelMap, groups: Sequence[ChannelGroup]
) -> tuple[Request, ...]:
    """Ask for the mean magnitudes of all activations on which units of groups lie."""
    wanted = np.zeros(channels.count, dtype=bool)
    for group in groups:
        wanted[group.units] = True
    found = {}
    for value in channels.activations:
        if wanted[value.units[value.units >= 0]].any():
            request = _request(value.value, value.axis)
            found[request.key] = request
    return tuple(found.values())


def _request(value: str, axis: int) -> Request:
    return Request(value, _OBSERVER, {"axis": axis})


def activation_scores(
    channels: ChannelMap, groups: Sequence[ChannelGroup], statistics: Mapping[str, Any]
) -> list[Scores]:
    """Score by mean absolute activations, averaged over the values on which units lie."""
    means: list[tuple[Scores, np.ndarray[Any, np.dtype[np.bool_]]]] = []
    for value in channels.activations:
        observed = statistics.get(_request(value.value, value.axis).key)
        if isinstance(observed, torch.Tensor):
            present = np.zeros(channels.count, dtype=bool)
            present[value.units[value.units >= 0]] = True
            means.append((unit_means(observed.numpy(), value.units, channels.count), present))
    found = []
    for group in groups:
        own = [mean[group.units] for mean, present in means if present[group.units].all()]
        found.append(normalized(average(own)) if own else np.zeros(len(group.units)))
    return found


def random_scores(channels: ChannelMap, groups: Sequence[ChannelGroup], seed: int) -> list[Scores]:
    """Score at random, as the baseline that a criterion has to beat."""
    drawn = np.random.default_rng(seed).random(channels.count)
    return [drawn[group.units] for group in groups]
