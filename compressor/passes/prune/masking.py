"""Zeroed units in place of removed ones, and the proof that both are the same function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from compressor.errors import ModelError
from compressor.types.carrier import Carrier, Runner
from compressor.types.channels import ChannelGroup, ChannelMap, Flags
from compressor.types.tensors import Array, Batch

# A divisor of zero gives NaN, and what any other constant adds to a channel is not read where the
# readers' weights are zero.
_NEVER_ZEROED = ("norm-variance", "other")
_FED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)
_TOLERANCES = {2: 2e-2}
"""By the bytes of an output's element, of the largest output; else 1e-4."""
_TOLERANCE = 1e-4


class MaskedModel:
    """A model that runs with any of its units zeroed, in one session of the runtime.

    The parameters that hold units become inputs, so that each run can be given others.

    Args:
        carrier: the model; it offers run and graph.
        channels: its channels.

    Attributes:
        unfed: why its units cannot be zeroed: a parameter's type cannot be fed; empty if they can.
    """

    def __init__(self, carrier: Carrier, channels: ChannelMap):
        biases = {layer.bias for layer in carrier.layers() if layer.bias}
        self._axes = _zeroed_axes(channels, biases)
        graph = carrier.graph().clone()
        self._parameters: dict[str, Array] = {}
        self.unfed = ""
        for name in self._axes:
            value = graph.graph.initializers[name]
            if value.dtype not in _FED or value.const_value is None:
                self.unfed = f"parameter {name!r} is {value.dtype}"
                continue
            self._parameters[name] = np.asarray(value.const_value.numpy())
            value.shape = ir.Shape(self._parameters[name].shape)
            del graph.graph.initializers[name]
            value.const_value = None
            graph.graph.inputs.append(value)
        self._model = carrier.with_graph(graph)

    @cached_property
    def _runner(self) -> Runner:
        return self._model.runner()

    def run(self, batch: Batch, removed: Flags) -> Batch:
        """Run one batch with the parameters of some units zeroed.

        Args:
            batch: the model's inputs.
            removed: the units.

        Raises:
            ModelError: the runtime does not load or run the model.
        """
        return self._runner.run({**batch, **self._masked(removed)})

    def _masked(self, removed: Flags) -> Batch:
        return {
            name: zeroed(array, self._axes[name], removed)
            for name, array in self._parameters.items()
        }


def zeroed(parameter: Array, axes: Mapping[int, Array], removed: Flags) -> Array:
    """Return a parameter with zeros where removed units lie; itself where none does.

    Args:
        parameter: of any shape.
        axes: the unit at each position, -1 for none, of the axes that hold units.
        removed: one flag for each unit of the model.
    """
    result = parameter
    for axis, units in axes.items():
        gone = np.flatnonzero((units >= 0) & removed[units])
        if gone.size:
            result = result.copy() if result is parameter else result
            result[(slice(None),) * axis + (gone,)] = 0
    return result


def _zeroed_axes(channels: ChannelMap, biases: Collection[str]) -> dict[str, dict[int, Array]]:
    found: dict[str, dict[int, Array]] = {}
    for group in channels.groups:
        for member in group.members:
            units = channels.parameters[member.parameter][member.axis]
            spared = member.role in _NEVER_ZEROED and member.parameter not in biases
            if not spared and units is not None:
                found.setdefault(member.parameter, {})[member.axis] = units
    return found


@dataclass(frozen=True)
class Proof:
    """What was shown of the removed units.

    Attributes:
        proved: how many of them, by comparing the sliced with the zeroed model.
        mixed: for groups that lost units and cannot be compared: the operator that mixes them.
        difference: the largest found, relative to the largest output.
    """

    proved: int
    mixed: Mapping[str, str]
    difference: float

    def note(self, made_up: bool) -> str:
        """Say it in one sentence."""
        data = "random inputs" if made_up else "calibration data"
        shown = (
            f"{self.proved} removed units were proved on {data}: the smaller model differs by at "
            f"most {self.difference:.1e} of the largest output from the one with zeros in their "
            "place"
            if self.proved
            else "no removal could be proved by zeroing"
        )
        if not self.mixed:
            return shown
        operators = ", ".join(dict.fromkeys(self.mixed.values()))
        return f"{shown}; not so the units of {len(self.mixed)} groups that {operators} mixes"


def prove(
    masked: Callable[[Flags], Batch],
    sliced: Callable[[Flags], Batch],
    channels: ChannelMap,
    removed: Flags,
) -> Proof:
    """Show that removing units is the same as zeroing all of their parameters.

    Args:
        masked: outputs of the model with units zeroed.
        sliced: outputs of the model without them, on the same batch.
        channels: the model's channels.
        removed: what was removed. Units of groups that an operator mixes are left out.

    Raises:
        ModelError: the outputs differ; names the first group that makes them differ.
    """
    losing = [g for g in channels.groups if removed[g.units].any()]
    pure = [g for g in losing if not g.mixed]
    mixed = {g.name: g.mixed for g in losing if g.mixed}
    flags = _only(pure, removed)
    if not pure:
        return Proof(0, mixed, 0.0)

    def difference(groups: Sequence[ChannelGroup]) -> tuple[float, float]:
        own = _only(groups, removed)
        return worst_difference(masked(own), sliced(own))

    found, limit = difference(pure)
    if found <= limit:
        return Proof(int(flags.sum()), mixed, found)
    low, high = 0, len(pure)  # the first `low` groups agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        now, bound = difference(pure[:middle])
        low, high = (middle, high) if now <= bound else (low, middle)
    raise ModelError(
        f"the channels of {pure[low].name!r}",
        f"cannot be removed: the smaller model's outputs differ by {found:.1e} of the largest from "
        f"those of the model with zeros in their place, and the limit is {limit:.0e}",
        f"report it with the model; until then protect them: layers: [{{match: {pure[low].name}, "
        "skip: true}]",
    )


def _only(groups: Sequence[ChannelGroup], removed: Flags) -> Flags:
    flags = np.zeros_like(removed)
    for group in groups:
        flags[group.units] = removed[group.units]
    return flags


def worst_difference(reference: Batch, other: Batch) -> tuple[float, float]:
    """Return the largest difference of float outputs, over their largest value, and its limit.

    Of several outputs that with the largest share of its limit counts. Where the reference is
    not finite, the other must be just that. Outputs pair by position.
    """
    worst, limit = 0.0, _TOLERANCE
    for ours, theirs in zip(reference.values(), other.values(), strict=True):
        if ours.shape != theirs.shape:
            return np.inf, limit
        if ours.dtype.kind != "f":
            continue
        own = _TOLERANCES.get(ours.itemsize, _TOLERANCE)
        found = _relative(ours.astype(np.float64), theirs.astype(np.float64))
        if found / own >= worst / limit:
            worst, limit = found, own
    return worst, limit


def _relative(reference: Array, other: Array) -> float:
    finite = np.isfinite(reference)
    if not np.array_equal(reference[~finite], other[~finite], equal_nan=True):
        return np.inf
    ours, theirs = reference[finite], other[finite]
    if not ours.size:
        return 0.0
    scale = float(np.abs(ours).max())
    difference = float(np.abs(ours - theirs).max())
    if not np.isfinite(difference):
        return np.inf
    return difference / scale if scale > 0 else difference
