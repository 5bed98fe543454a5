"""Choose the observer with whose ranges a model's outputs err least on calibration samples.

Activations are rounded as they will be, and weights stay floats: their codes hardly depend on the
ranges. Scales and zero points are inputs of one session, so that an observer costs a run of some
samples.

An observer is judged by the ranges that it will have, from all samples, which none of these
exceeds much. A sample that is seen later may: it has the greatest of ``N + 1`` values of an
activation with probability ``1 / (N + 1)``, whatever their distribution, since any of them is as
likely to come last. So the error to expect is that of the calibration samples, and with the
probability that one of the activations is exceeded that of samples which were held back from
ranges and exceed them: the quarter with the greatest activations. Then half of the
samples stand for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from compressor.graph.costs import macs
from compressor.graph.editing import Editor
from compressor.graph.values import value_by_name
from compressor.models.onnx.ort_runner import graph_runner
from compressor.passes.quantize.static.placement import ActivationCode
from compressor.passes.quantize.static.settings import Decision
from compressor.types.carrier import Carrier
from compressor.types.data import Samples
from compressor.types.passes import PassContext
from compressor.types.tensors import (
    Array,
    Batch,
    Feed,
    cut,
    filled,
    fixed_batch,
    picked,
    samples_in,
)

MOST_SAMPLES = 64
"""Calibration samples that are run with each observer, at most."""

_FEWEST = 16  # samples that are run at least, if there are so many
_MOST_MACS = 16e9  # of more samples than these, in the float model
_MOST_BYTES = 64 << 20  # of these samples
_TOGETHER = 8  # samples in a run
_HELD = 4  # one of so many samples is held back
_FEWEST_HELD = 4  # of fewer, a single one could decide against what all samples say
_RARELY = 0.1  # how often a later sample may exceed a range before that counts
_Codes: TypeAlias = Mapping[str, ActivationCode]
_FLOOR = 1e-12  # of a squared error over the signal: what is less is none


@dataclass(frozen=True)
class ObserverChoice:
    """The observer that was chosen.

    Attributes:
        observer: which of those that a decision allows.
        note: by how much it is better, on how many samples; empty where there was no choice.
    """

    observer: int = 0
    note: str = ""


def choose_observer(
    carrier: Carrier, decision: Decision, statistics: Mapping[str, Any], context: PassContext
) -> ObserverChoice:
    """Return the best of those that a decision allows; the first where there is nothing to run.

    Args:
        carrier: the float model.
        decision: what is quantized in it.
        statistics: the ranges by every observer, by ``Request.key``.
        context: with the calibration data.
    """
    names, samples = decision.settings.activations.observers, context.samples
    if len(names) == 1 or samples is None or samples.made_up:
        return ObserverChoice()
    pixels = decision.pixel_inputs()
    exact = {pixel.value for pixel in pixels if statistics[pixel.request.key] is not None}
    values = [value for value in decision.placement.values if value not in exact]
    tried = dict[int, _Codes]()
    for index in range(len(names)):
        codes = decision.codes({}, statistics, index, values)
        if codes not in tried.values():
            tried[index] = codes
    if len(tried) == 1:
        return ObserverChoice()
    data = _Data(carrier, samples)
    simulation = _Simulation(decision.model, tried[0])
    later = exceeding(len(values), data.seen)
    extremes = data.split(values) if later > _RARELY else None
    judged = [(1.0, data.kept, list(tried.values()))]
    if extremes is not None and context.collect is not None:
        held, rest = extremes
        requests = [r for value in values for r in decision.range_requests(value)]
        ranges = context.collect(carrier, requests, data.together(rest))
        held_codes: list[_Codes] = [decision.codes({}, ranges, index, values) for index in tried]
        judged = [(1 - later, data.kept[::2], judged[0][2]), (later, held, held_codes)]
    errors, signals = _expected_errors(data, simulation, judged)
    with np.errstate(divide="ignore", invalid="ignore"):
        place, gain = best(errors / signals.sum(0))
    index = list(tried)[place]
    result = f"is {gain:.1f} dB less than with {names[0]}" if index else "is not less with another"
    count = len(data.kept) * (samples_in(data.kept[0]) if data.whole else 1)
    on = f"{count} calibration sample{'s' if count > 1 else ''}"
    return ObserverChoice(index, f"observer {names[index]}: on {on}, the outputs' error {result}")


def exceeding(values: int, samples: int) -> float:
    """Return how likely a later sample exceeds one of some values of earlier ones.

    As if values exceeded theirs independently of each other; less, if they do so together.
    """
    return 1.0 - (1.0 - 1.0 / (samples + 1)) ** values


class _Data:
    """Calibration samples that judge.

    Args:
        carrier: the float model.
    """

    def __init__(self, carrier: Carrier, samples: Samples):
        self.carrier = carrier
        self.whole = fixed_batch(carrier.inputs) is not None
        self._inputs = carrier.inputs
        names = [spec.name for spec in carrier.inputs]
        batches = (picked(batch, names) for batch in samples.batches())
        self.kept, places = spread(batches, whole=self.whole)
        self.seen = places * samples_in(self.kept[0]) if self.whole else places
        while len(self.kept) >= 2 * _FEWEST and len(self.kept) * self._work() > _MOST_MACS:
            self.kept = self.kept[::2]

    def _work(self) -> float:
        """Return about how many multiplications a run takes; lengths that vary count by inputs."""
        declared = sum(prod(x if isinstance(x, int) else 1 for x in s.shape) for s in self._inputs)
        given = sum(array.size for array in self.kept[0].values())
        return macs(self.carrier.graph()) * given / max(declared, 1)

    def split(self, values: Sequence[str]) -> tuple[list[Batch], list[Batch]] | None:
        """Return the samples with the greatest values, a quarter, and the others; if not too few.

        A sample's values rank among those of the others, and the mean of its ranks counts.
        """
        count = len(self.kept)
        held = count // _HELD
        if held < _FEWEST_HELD:
            return None
        inputs = {spec.name for spec in self._inputs}
        runner = self.carrier.runner([value for value in values if value not in inputs])
        peaks = np.zeros((count, len(values)))
        for row, sample in enumerate(self.kept):
            arrays = {**sample, **runner.run(sample)}
            peaks[row] = [np.abs(arrays[value]).max(initial=0.0) for value in values]
        ranks = peaks.argsort(0, kind="stable").argsort(0).mean(1)
        order = ranks.argsort(kind="stable").tolist()
        return [self.kept[i] for i in order[-held:]], [self.kept[i] for i in order[:-held]]

    def together(self, samples: Sequence[Batch]) -> Iterator[Batch]:
        """Yield samples, neighbours of the same shapes as one batch."""

        def shapes(sample: Batch) -> list[tuple[int, ...]]:
            return [array.shape for array in sample.values()]

        for _, alike in groupby(samples, shapes):
            group = list(alike)
            if self.whole or isinstance(group[0], Feed):
                yield from group
                continue
            for start in range(0, len(group), _TOGETHER):
                some = group[start : start + _TOGETHER]
                yield {name: np.concatenate([s[name] for s in some]) for name in some[0]}


def spread(batches: Iterable[Batch], *, whole: bool) -> tuple[list[Batch], int]:
    """Return up to 64 single samples, in the same distance from each other over all of the data.

    Returns:
        The samples, and how many there are in all.

    Args:
        whole: batches cannot be cut: each counts as a sample.
    """
    kept: list[Batch] = []
    step, seen = 1, 0
    for batch in batches:
        for row in range(1 if whole else samples_in(batch)):
            if seen % step == 0:
                sample = batch if whole else cut(batch, row, row + 1)
                kept.append(type(batch)((name, array.copy()) for name, array in sample.items()))
                size = sum(array.nbytes for held in kept for array in held.values())
                if len(kept) > MOST_SAMPLES or (len(kept) > 1 and size > _MOST_BYTES):
                    kept, step = kept[::2], 2 * step
            seen += 1
    return kept, seen


def best(errors: Array) -> tuple[int, float]:
    """Return which error is least, and by how many dB less than the first's.

    Outputs count alike, each by its squared error over all samples in dB. The first stays where
    another is only better because of a single sample.

    Args:
        errors: squared errors over the output's signal, ``[observers, samples, outputs]``.
    """
    errors = errors[:, :, np.isfinite(errors).all((0, 1))]
    if not errors.size:
        return 0, 0.0
    total = errors.sum(1, keepdims=True)
    gains = _gains(total)[:, 0]
    steady = _gains(np.maximum(total - errors, 0.0)).min(1) > 0
    index = int(np.where(steady, gains, -np.inf).argmax()) if steady.any() else 0
    return index, float(gains[index])


def _gains(totals: Array) -> Array:
    """Return by how many dB the mean over outputs is below the first's, ``[observers, N]``."""
    levels = 10 * np.log10(totals + _FLOOR).mean(2)
    return np.asarray(levels[:1] - levels)


class _Simulation:
    """A model whose activations are rounded by codes that a run is given.

    It is not optimized: the runtime's optimizer takes scales that are inputs for others.

    Args:
        model: not changed.
        codes: the values to round; of each code only the type counts, and whether it has limits.
    """

    def __init__(self, model: ir.Model, codes: Mapping[str, ActivationCode]):
        graph = model.clone()
        self._editor, self._graph = Editor(graph), graph.graph
        present = value_by_name(graph)
        self._entries = {name: self._round(present[name], code) for name, code in codes.items()}
        self._runner = graph_runner(graph, optimize=False)

    def run(self, batch: Batch, codes: Mapping[str, ActivationCode]) -> list[Array]:
        """Return the outputs, in the order of the model's."""
        feed = dict(batch)
        for value, entries in self._entries.items():
            code = codes[value]
            numbers = (code.scale, code.zero_point, *(code.limits or ()))
            for entry, number in zip(entries, numbers, strict=True):
                assert entry.dtype is not None
                feed[entry.name or ""] = np.asarray(number, entry.dtype.numpy())
        return list(self._runner.run(feed).values())

    def _round(self, value: ir.Value, code: ActivationCode) -> list[ir.Value]:
        """Round a value for all of its readers; return the inputs that its code is given by."""
        float32, editor, uses = ir.DataType.FLOAT, self._editor, list(value.uses())
        keys = {"scale": float32, "zero_point": code.dtype}
        if code.limits is not None:
            keys |= {"low": float32, "high": float32}
        entries = [
            ir.Value(
                name=editor.free_name(f"{value.name}.{key}"),
                type=ir.TensorType(dtype),
                shape=ir.Shape(()),
            )
            for key, dtype in keys.items()
        ]
        self._graph.inputs.extend(entries)
        nodes, source = list[ir.Node](), value
        if code.limits is not None:
            nodes.append(editor.node("Clip", [value, *entries[2:]], f"{value.name}.clip", float32))
            source = nodes[-1].outputs[0]
        for op_type, dtype in (("QuantizeLinear", code.dtype), ("DequantizeLinear", float32)):
            operands = [source, *entries[:2]]
            nodes.append(editor.node(op_type, operands, f"{value.name}.{op_type}", dtype))
            source = nodes[-1].outputs[0]
        producer = value.producer()
        if producer is None:
            self._graph.insert_before(self._graph[0], nodes)
        else:
            self._graph.insert_after(producer, nodes)
        for node, index in uses:
            node.replace_input_with(index, source)
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[index] = source
        return entries


def _expected_errors(
    data: _Data,
    simulation: _Simulation,
    judged: Sequence[tuple[float, Sequence[Batch], Sequence[_Codes]]],
) -> tuple[Array, Array]:
    """Return errors and signals as :func:`_output_errors`, of samples that stand for a share each.

    Args:
        judged: a share of later samples, the samples that stand for it, and each observer's codes.
    """
    errors, signals = list[Array](), list[Array]()
    for share, samples, codes in judged:
        error, signal = _output_errors(data, simulation, codes, samples)
        errors.append(error * share / error.shape[1])
        signals.append(signal * share / error.shape[1])
    return np.concatenate(errors, 1), np.concatenate(signals)


def _output_errors(
    data: _Data, simulation: _Simulation, codes: Sequence[_Codes], samples: Sequence[Batch]
) -> tuple[Array, Array]:
    """Return squared errors ``[observers, samples, outputs]`` and signals ``[samples, outputs]``.

    Outputs that are no floats are left out if others are.

    Args:
        codes: by each observer.
    """
    runner, signals, errors = data.carrier.runner(), list[Array](), list[Array]()
    for batch in data.together(samples):
        rows = samples_in(batch)
        wanted = list(runner.run(batch).values())
        floats = [i for i, array in enumerate(wanted) if array.dtype.kind == "f"]
        places: Collection[int] = floats or range(len(wanted))
        signals.append(np.stack([_squares(wanted[i], None, rows) for i in places], 1))
        parts = []
        for given in codes:
            outputs = simulation.run(batch, given)
            parts.append(np.stack([_squares(wanted[i], outputs[i], rows) for i in places], 1))
        errors.append(np.stack(parts))
    return np.concatenate(errors, 1), np.concatenate(signals)


def _squares(wanted: Array, given: Array | None, rows: int) -> Array:
    """Return sums of squares of an array, or of its difference from another, for each sample."""
    values = wanted.astype(np.float64)
    if given is not None:
        values, others = filled(values, given)
        values = values - others
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(values)
    if squares.ndim and len(squares) == rows:
        return np.asarray(squares.reshape(rows, -1).sum(1))
    return np.full(rows, squares.sum() / rows)
