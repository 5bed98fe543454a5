"""Prove a removal by zeroing the same units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import ModelError
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes
from compressor.models.executor import GraphModule
from compressor.types.carrier import Carrier, Runner
from compressor.types.channels import SPARED, ChannelGroup, ChannelMap, Flags
from compressor.types.tensors import Array, Batch, worst_difference

_FED = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)
_NO_CHANGES: Batch = {}


class MaskedModel:
    """A model that runs with any of its units zeroed, in one session of the runtime.

    The parameters that hold units become inputs, so that each run can be given others.

    Args:
        others: names of further parameters that a run can be given.

    Attributes:
        unfed: why its units cannot be zeroed: a parameter's type cannot be fed; empty if they can.
    """

    def __init__(self, carrier: Carrier, channels: ChannelMap, others: Collection[str] = ()):
        self._axes = zeroed_axes(channels)
        graph = carrier.graph().clone()
        self._parameters: dict[str, Array] = {}
        self.unfed = ""
        for name in dict.fromkeys([*self._axes, *others]):
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

    def run(self, batch: Batch, removed: Flags, changes: Batch = _NO_CHANGES) -> Batch:
        """Run one batch with the parameters of ``removed`` units zeroed.

        Args:
            changes: parameters in place of the model's own.

        Raises:
            ModelError: the runtime does not load or run the model.
        """
        return self._runner.run({**batch, **self._masked(removed, changes)})

    def run_in_doubles(self, batch: Batch, removed: Flags) -> Batch:
        """Do the same in double precision: see :func:`in_doubles`."""
        return in_doubles(self._model.graph(), {**batch, **self._masked(removed)})

    def _masked(self, removed: Flags, changes: Batch = _NO_CHANGES) -> dict[str, Array]:
        return {
            name: zeroed(changes.get(name, own), self._axes.get(name, {}), removed)
            for name, own in self._parameters.items()
        }


def in_doubles(model: ir.Model, batch: Batch) -> Batch:
    """Run one batch in double precision, whatever floats a model computes in.

    Raises:
        ModelError: PyTorch cannot run the model.
    """
    wide = model.clone()
    for node in all_nodes(wide.graph):
        kind = ir.DataType(node.attributes.get_int("to", 0))
        if operator(node).moves == "type" and kind.is_floating_point():
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.DOUBLE)
    module = GraphModule(wide).double()
    floats = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in batch.items()}
    with torch.inference_mode():
        outputs = module(**{n: torch.from_numpy(a.copy()) for n, a in floats.items()})
    return {name: output.numpy() for name, output in outputs.items()}


def zeroed(parameter: Array, axes: Mapping[int, Array], removed: Flags) -> Array:
    """Return a parameter with zeros where removed units lie; itself where none does.

    ``axes`` holds the unit at each position, -1 for none, of the axes that hold units.
    """
    result = parameter
    for axis, units in axes.items():
        gone = np.flatnonzero((units >= 0) & removed[units])
        if gone.size:
            result = result.copy() if result is parameter else result
            result[(slice(None),) * axis + (gone,)] = 0
    return result


def zeroed_axes(channels: ChannelMap) -> dict[str, dict[int, Array]]:
    """Return the axes of parameters along which units are zeroed, with the units."""
    axes: dict[str, dict[int, Array]] = {}
    for group in channels.groups:
        for member in group.members:
            units = channels.parameters[member.parameter][member.axis]
            if member.role not in SPARED and units is not None:
                axes.setdefault(member.parameter, {})[member.axis] = units
    return axes


@dataclass(frozen=True)
class Proof:
    """What was proved about the removed units."""

    proved: int  # how many of them, by comparing the sliced with the zeroed model
    # for groups that lost units and cannot be compared: the operator that mixes them
    mixed: Mapping[str, str]
    difference: float  # the largest found, relative to the largest output
    rounding: float = 0.0  # the same in the model's own precision, if it took doubles to prove it

    def note(self, made_up: bool) -> str:
        """Return it in one sentence."""
        data = "random inputs" if made_up else "calibration data"
        precision = "in double precision " if self.rounding else ""
        shown = (
            f"{self.proved} removed units were proved on {data}: {precision}the smaller model "
            f"differs by at most {self.difference:.1e} of the largest output from the one with "
            "zeros in their place"
            if self.proved
            else "no removal could be proved by zeroing"
        )
        if self.rounding:
            shown += f"; rounding in the model's own makes that {self.rounding:.1e}"
        if not self.mixed:
            return shown
        operators = ", ".join(dict.fromkeys(self.mixed.values()))
        uncompared = f"the units of {len(self.mixed)} groups that {operators} mixes"
        return f"{shown}; {uncompared} were not compared"


Compared: TypeAlias = Callable[[Flags], tuple[Batch, Batch]]
"""Returns outputs of one batch with units zeroed, and of the smaller model without them."""


def prove(compared: Compared, exactly: Compared, channels: ChannelMap, removed: Flags) -> Proof:
    """Show that removing units is the same as zeroing all of their parameters.

    Units of groups that an operator mixes are left out. A network may magnify the rounding of its
    sums, whose order changes, to more than the limit; so where outputs differ, doubles decide.

    Args:
        compared: in the model's own precision.
        exactly: in doubles; raises a ``ModelError`` if the model cannot be run so.

    Raises:
        ModelError: the outputs differ; names the first group that makes them differ.
    """
    losing = [g for g in channels.groups if removed[g.units].any()]
    pure = [g for g in losing if not g.mixed]
    mixed = {g.name: g.mixed for g in losing if g.mixed}
    flags = _only(pure, removed)
    if not pure:
        return Proof(0, mixed, 0.0)

    error, limit = worst_difference(*compared(flags))
    if error <= limit:
        return Proof(int(flags.sum()), mixed, error)
    with suppress(ModelError):
        exact, limit = worst_difference(*exactly(flags))
        if exact <= limit:
            return Proof(int(flags.sum()), mixed, exact, rounding=error)
        error, compared = exact, exactly
    low, high = 0, len(pure)  # the first `low` groups agree, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        now, bound = worst_difference(*compared(_only(pure[:middle], removed)))
        low, high = (middle, high) if now <= bound else (low, middle)
    raise ModelError(
        f"the channels of {pure[low].name!r}",
        f"cannot be removed: the smaller model's outputs differ by {error:.1e} of the largest from "
        f"those of the model with zeros in their place, and the limit is {limit:.0e}",
        f"report it with the model; until then protect them: layers: [{{match: {pure[low].name}, "
        "skip: true}]",
    )


def _only(groups: Sequence[ChannelGroup], removed: Flags) -> Flags:
    flags = np.zeros_like(removed)
    for group in groups:
        flags[group.units] = removed[group.units]
    return flags
