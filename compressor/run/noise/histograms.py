"""The range in which a graph represents an activation that it quantizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from compressor.calibration.portions import Portions
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.graph.values import constant_array, is_op, maker_behind
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer
from compressor.types.tensors import Array, Batch, samples_in


@dataclass(frozen=True)
class CodeRange:
    """The range of integer codes: from ``low`` to ``high`` in steps of ``step``."""

    low: float
    high: float
    step: float


def activation_range(value: ir.Value | None) -> CodeRange | Literal["dynamic"] | None:
    """Return the range that a value's codes represent.

    Args:
        value: a layer's input: the floats behind ``DequantizeLinear``, or codes.

    Returns:
        The range; ``dynamic`` if each input gets its own; ``None`` if the value stays float, or has
        no single constant scale for the whole tensor.
    """
    node = maker_behind(value, lambda row: row.dequantizes or row.name == "DynamicQuantizeLinear")
    if node is None:
        return None
    if not operator(node).dequantizes:
        return "dynamic"
    scale, zero = (constant_array(v) for v in (*node.inputs[1:], None)[:2])
    codes = node.inputs[0]
    if scale is None or scale.size != 1 or codes is None or codes.dtype is None:
        return None
    step, center = float(scale.reshape(())), 0.0 if zero is None else float(zero.reshape(()))
    limits = _code_limits(codes.dtype)
    if limits is None:
        return None
    low, high = ((limit - center) * step for limit in limits)
    return CodeRange(*_clipped(codes, low, high), step)


def _code_limits(dtype: ir.DataType) -> tuple[float, float] | None:
    if not dtype.is_integer():
        return None
    if dtype.is_signed():
        return float(-(1 << (dtype.bitwidth - 1))), float((1 << (dtype.bitwidth - 1)) - 1)
    return 0.0, float((1 << dtype.bitwidth) - 1)


def _clipped(codes: ir.Value, low: float, high: float) -> tuple[float, float]:
    """Narrow bounds to those of a ``Clip`` before, since codes may have a wider type."""
    quantize = maker_behind(codes, lambda row: row.quantizes)
    if quantize is None or quantize.inputs[0] is None:
        return low, high
    clip = quantize.inputs[0].producer()
    if clip is None or not is_op(clip, "Clip"):
        return low, high
    least, most = (constant_array(v) for v in (*clip.inputs[1:], None, None)[:2])
    low = low if least is None else max(low, float(np.asarray(least).reshape(())))
    high = high if most is None else min(high, float(np.asarray(most).reshape(())))
    return low, high


BINS = 64
MOST_LAYERS = 8
_MOST_VALUES = 1 << 22


@dataclass(frozen=True)
class _Place:
    """A layer in a model's graph, with the node that multiplies by its weight."""

    layer: Layer
    node: ir.Node

    @property
    def weight(self) -> ir.Value | None:
        """The node's weight: an initializer, or dequantized codes."""
        names = self.layer.inputs
        return next((v for v in self.node.inputs if v is not None and v.name not in names), None)


def layer_histograms(
    before: Carrier,
    after: Carrier,
    batches: Sequence[Batch],
    layers: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Count the values of the up to eight layers that lost most by a pass.

    Args:
        before: the model before the pass, whose weights and activations are counted.
        after: the model after it, which has the ranges.
        batches: inputs of both models.
        layers: the entries of the layers after the pass in ``report.json``.

    Returns:
        An entry for each layer, the worst first: ``name``, ``weight`` and ``input``.
    """
    then, now = _places(before), _places(after)
    names = [name for name in _worst(layers) if name in now and name in then][:MOST_LAYERS]
    if not names:
        return []
    old, new = [then[name] for name in names], [now[name] for name in names]
    inputs = _inputs(before, batches, old, {name: _bounds(now[name]) for name in names})
    weights, changed = _weights(before, batches[0], old), _weights(after, batches[0], new)
    return [
        {
            "name": name,
            "weight": _weight(weights.get(name), changed.get(name), now[name]),
            "input": _input(inputs.get(name), now[name]),
        }
        for name in names
    ]


def counted(values: Array, bounds: tuple[float, float] | None = None) -> dict[str, Any]:
    """Count values in 64 equal bins from the least to the greatest.

    Above four million values, every second, third and so on is counted.

    Args:
        values: of any shape, finite, not empty.
        bounds: edges of the first and last bin, by default the least and greatest value; values
            outside are not counted.

    Returns:
        ``low`` and ``high``, the edges, and ``counts``.
    """
    flat = np.asarray(values).reshape(-1)
    flat = flat[:: max(1, -(-flat.size // _MOST_VALUES))].astype(np.float64)
    low, high = bounds or (float(flat.min()), float(flat.max()))
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(flat, BINS, (low, high))
    return {"low": low, "high": high, "counts": counts.tolist()}


def _places(carrier: Carrier) -> dict[str, _Place]:
    """Return the layers of the main graph by name, each with its first reader."""
    graph = carrier.graph()
    places: dict[str, _Place] = {}
    for layer, node in layers_with_nodes(graph):
        if node.graph is graph.graph:
            places.setdefault(layer.name, _Place(layer, node))
    return places


def _worst(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the layers whose weight changed, those with the least output SQNR first."""
    coarser = [row for row in layers if row["weight_sqnr_db"] is not None]
    measured = [row for row in coarser if row["sqnr_db"] is not None]
    return [str(row["name"]) for row in sorted(measured, key=lambda row: float(row["sqnr_db"]))]


def _weights(carrier: Carrier, batch: Batch, places: Sequence[_Place]) -> dict[str, Array]:
    """Return the weights of layers, by layer, if they are floats.

    Weights that stay codes while the model runs have no float values.
    """
    weights: dict[str, Array] = {}
    taps: dict[str, str] = {}
    for place in places:
        value, name = place.weight, place.layer.name
        if value is None or value.name is None or value.dtype is None:
            continue
        if not value.dtype.is_floating_point():
            continue
        if value.is_initializer():
            weights[name] = carrier.weight(place.layer).float().numpy()
        else:
            taps[name] = value.name
    if taps:  # the samples make no difference, so a few are enough
        runner = carrier.runner(list(taps.values()))
        portions = Portions(lambda part: (runner.run(part),), [carrier], most=1)
        first = next(portions.of(batch))
        weights.update({name: first.values[0][tap] for name, tap in taps.items()})
    return {name: v for name, v in weights.items() if _countable(v)}


class _Values:
    """Values of which a batch has more with each portion.

    Args:
        bounds: between which codes represent them; ``None`` if they stay float.
    """

    def __init__(self, bounds: tuple[float, float] | None):
        self._bounds = bounds
        self._kept: list[Array] = []
        self._step = 0
        self._seen = self._outside = 0
        self.samples = 0
        self.countable = True

    def add(self, values: Array, samples: int, share: float) -> None:
        """Look at a portion's values, and keep those that are counted.

        Args:
            samples: that the values are of.
            share: of all values that there will be; the first portion's counts.
        """
        self.countable = self.countable and _countable(values)
        if not self.countable:
            self._kept.clear()
            return
        if not self._step:
            self._step = max(1, -(-round(values.size / share) // _MOST_VALUES))
        flat = values.reshape(-1)
        self._kept.append(flat[-self._seen % self._step :: self._step].copy())
        self._seen += flat.size
        self.samples += samples
        if self._bounds is not None:
            low, high = self._bounds
            self._outside += int(((values < low) | (values > high)).sum())

    def entry(self) -> dict[str, Any]:
        """Return the counts, the number of samples, and the percentage outside the bounds."""
        outside = None if self._bounds is None else 100.0 * self._outside / self._seen
        return {
            **counted(np.concatenate(self._kept)),
            "samples": self.samples,
            "outside": outside,
        }


def _inputs(
    carrier: Carrier,
    batches: Sequence[Batch],
    places: Sequence[_Place],
    bounds: Mapping[str, tuple[float, float] | None],
) -> dict[str, _Values]:
    """Return what enters layers, by layer, if it is known and floats."""
    read = {p.layer.name: p.layer.inputs[0] for p in places if p.layer.inputs}
    computed = {v.name for node in carrier.graph().graph for v in node.outputs}
    taps = [n for n in dict.fromkeys(read.values()) if n in computed]
    runner = carrier.runner(taps) if taps else None
    portions = Portions(
        lambda part: (part if runner is None else {**part, **runner.run(part)},), [carrier]
    )
    counted = {name: _Values(bounds[name]) for name in read}
    count = sum(map(samples_in, batches))
    for portion in portions.of_all(batches):
        (values,) = portion.values
        for name, value in read.items():
            if value in values:
                share = 1.0 if portions.constant(value) else portion.samples / count
                counted[name].add(values[value], portion.samples, share)
        del portion, values  # before the next run needs the memory
    return {name: values for name, values in counted.items() if values.samples and values.countable}


def _countable(values: Array) -> bool:
    return values.dtype.kind == "f" and values.size > 0 and bool(np.isfinite(values).all())


def _weight(values: Array | None, stored: Array | None, now: _Place) -> dict[str, Any] | None:
    """Describe a weight: counts before and after the pass, and the range of its codes."""
    if values is None:
        return None
    entry = counted(values)
    if stored is None or stored.size != values.size:
        why = "it stays codes while the model runs" if stored is None else "it has another size"
        return {**entry, "after": None, "range": None, "range_reason": why}
    after = counted(stored, (entry["low"], entry["high"]))["counts"]
    if now.weight is not None and now.weight.is_initializer():
        return {**entry, "after": after, "range": None, "range_reason": "it stays float"}
    bounds = [float(stored.min()), float(stored.max())]
    return {**entry, "after": after, "range": bounds, "range_reason": None}


def _bounds(now: _Place) -> tuple[float, float] | None:
    """Return the bounds between which values round to a code, if there are any."""
    bounds = activation_range(now.node.inputs[0])
    if bounds is None or bounds == "dynamic":
        return None
    # Up to half a step beyond the last code, rounding is no coarser than anywhere else.
    half = bounds.step / 2
    return bounds.low - half, bounds.high + half


def _input(values: _Values | None, now: _Place) -> dict[str, Any] | None:
    """Describe a layer's input: counts before the pass, its range, and the percentage clipped."""
    if values is None:
        return None
    entry = values.entry()
    bounds = activation_range(now.node.inputs[0])
    if bounds is None or bounds == "dynamic":
        why = "it stays float" if bounds is None else "it is determined for each input"
        return {**entry, "range": None, "range_reason": why}
    return {**entry, "range": [bounds.low, bounds.high], "range_reason": None}
