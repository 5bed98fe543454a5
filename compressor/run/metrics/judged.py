"""The inputs of a metric: the outputs that it judges, and their targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from compressor import catalog
from compressor.errors import DataError, listed
from compressor.graph.output_parts import (
    WHOLE,
    OutputParts,
    compared_outputs,
    named_parts,
    output_parts,
)
from compressor.run.metrics.metrics import COSINE, MSE, Metric
from compressor.types.carrier import Capability, Carrier
from compressor.types.tensors import Array, Batch, Feed, answers, filled, samples_in
from compressor.types.training import Measure

if TYPE_CHECKING:
    from compressor.run.data import Data

_NARROW = "at passes that narrow the range (cast to fp16)"


def judged_parts(carrier: Carrier, data: Data) -> OutputParts:
    """Return what a model's outputs are joined of; nothing where its graph is not known, or a
    sample is a whole run, whose outputs have no axis of samples."""
    known = not data.feeds and data.recurrence is None and Capability.GRAPH in carrier.offers
    return output_parts(carrier.graph()) if known else ()


def compared_parts(carrier: Carrier, data: Data) -> OutputParts:
    """Return what a metric compares of each output, as :func:`judged_parts` does.

    An output that says nothing, by :func:`~compressor.graph.output_parts.compared_outputs`, has
    no part. Nothing is returned where all outputs count as a whole.
    """
    parts = judged_parts(carrier, data)
    if Capability.GRAPH not in carrier.offers:
        return parts
    counted = compared_outputs(carrier.graph())
    if data.recurrence is not None:
        counted = tuple(counted[place] for place in data.recurrence.judged)
    if all(counted) or not any(counted):
        return parts
    parts = parts or (WHOLE,) * len(counted)
    return tuple(cuts if counts else () for cuts, counts in zip(parts, counted, strict=True))


def judged_outputs(batch: Batch, outputs: Batch, metric: Measure) -> Batch:
    """Return the outputs that a metric judges, with samples as first axis.

    The user's own metric gets all outputs; of a feed, as the model gives them. For a metric of
    tokens, those that the attention mask leaves out are zeros.

    Raises:
        DataError: no output has an axis of samples.
    """
    if metric.code is not None:
        return outputs
    if isinstance(batch, Feed):
        outputs = {name: array[None] for name, array in outputs.items()}
    sampled = metric.sampled(outputs, samples_in(batch))
    return {n: _unmasked(batch, a) for n, a in sampled.items()} if metric.of_tokens else sampled


def read_outputs(outputs: Batch, judged: Batch, target: Any, metric: Metric) -> set[str]:
    """Return the names of the outputs that decide a metric.

    Args:
        judged: those that it gets, in parts.
    """
    if metric.code is None and metric.output_parts:
        pairs = zip(outputs.items(), metric.output_parts, strict=True)
        return {name for (name, a), cuts in pairs if named_parts({name: a}, [cuts]).keys() & judged}
    if metric.code is not None:
        return set(judged)
    if metric.name in (MSE.name, COSINE.name) and isinstance(target, dict):
        return set(target)
    return set(list(judged)[:1])


def _unmasked(batch: Batch, output: Array) -> Array:
    """Return an output ``[N, tokens, ...]`` with zeros in place of tokens that are masked.

    The mask is an array ``[N, tokens]`` of the batch with ``mask`` in its name; without one, the
    output is as it is.
    """
    for name, mask in batch.items():
        if "mask" in name and mask.ndim == 2 < output.ndim and mask.shape == output.shape[:2]:
            kept = (mask != 0).reshape(*mask.shape, *[1] * (output.ndim - 2))
            return np.asarray(np.where(kept, output, 0))
    return output


def target_of(batch: Batch, label: str | None, expected: Batch, metric: Metric) -> Any:
    """Return what a metric compares with: labels, or the float model's outputs.

    Args:
        label: name of the array with the labels, if there is one.
        expected: the float model's judged outputs.

    Raises:
        DataError: there are several targets, and the metric is a built-in one, which takes one or,
            like ``mse``, those that have the names of outputs.
    """
    if label is None or metric.against_float:
        return expected
    whole = isinstance(batch, Feed) and metric.code is None
    target = batch[label][None] if whole else answers(batch, label)
    built_in = metric.code is None and metric.name in catalog.BUILT_IN["metric"]
    if (
        built_in
        and isinstance(target, dict)
        and (metric.needs_labels or not target.keys() <= expected.keys())
    ):
        raise DataError(
            f"metric {metric.name!r}",
            f"takes one target, and the data have {listed(list(target))}",
            "give a function of the outputs and the dictionary of targets as the metric",
        )
    return target


def check_finite(
    outputs: Batch, seen: int, size: int, inputs: Batch | None = None, *, exact: bool = False
) -> None:
    """Raise ``DataError`` for an output that is not finite; it names the sample, where that shows.

    Args:
        seen: how many samples there were before.
        size: how many samples the outputs are of.
        inputs: what the outputs were computed from, if one of these may be at fault.
        exact: they are the float model's, which no pass changed.
    """
    at_fault = "at the model: it is the float one that gives it" if exact else _NARROW
    for name, array in outputs.items():
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        where, rows = f"samples {seen} to {seen + size - 1}", slice(None)
        if size == 1 or (array.ndim and len(array) == size):
            wrong = ~np.isfinite(array.reshape(size, -1)).all(axis=1)
            row = int(np.flatnonzero(wrong)[0])
            where, rows = f"sample {seen + row}", slice(row, row + 1)
        for given, values in (inputs or {}).items():
            apart = values.dtype.kind == "f" and values.ndim and len(values) == size
            if apart and not np.isfinite(values[rows]).all():
                raise DataError(
                    f"input {given!r}",
                    f"is NaN or infinite for {where}",
                    "look at that sample in the file (from 0, of those that are used), and after "
                    "its transform",
                )
        raise DataError(
            f"output {name!r}",
            f"is NaN or infinite for {where}",
            f"look at that sample, and {at_fault}",
        )


class ConstantAnswer:
    """Gives the answer to the first sample to every other one.

    Models whose outputs hardly depend on their inputs, outputs with a large constant part, samples
    of one class and wrong labels have one thing in common: one answer for all is as good as each
    sample's own, or nearly. A limit that it meets shows nothing.

    The user's own metrics (see :meth:`~compressor.run.evaluate.Evaluation.constant_drop`), figures
    of a whole corpus, and the perplexity, whose scores take much memory, are not looked at. Where
    outputs have other shapes, a metric against the float model fills both with zeros, as for an
    artifact; one with labels leaves such samples out.
    """

    def __init__(self, metric: Metric):
        self._metric = metric
        self._looks = metric.code is None and metric.figure is None and not metric.exponential
        self._values: list[Array] = []
        self._first: Batch | None = None

    def add(self, outputs: Batch, target: Any, size: int) -> None:
        """Add the judged outputs of ``size`` samples, and their targets."""
        if not self._looks:
            return
        if self._first is None:
            self._first = {name: array[:1].copy() for name, array in outputs.items()}
            size -= 1
            several = isinstance(target, dict)
            target = {n: a[1:] for n, a in target.items()} if several else target[1:]
        if not size or outputs.keys() != self._first.keys():  # rows as many as samples by chance
            return
        given = {
            name: np.broadcast_to(array, (size, *array.shape[1:]))
            for name, array in self._first.items()
        }
        if any(outputs[name].shape[1:] != array.shape[1:] for name, array in given.items()):
            if not self._metric.against_float:
                return
            pairs = {name: _filled(array, target[name]) for name, array in given.items()}
            given, target = ({name: pair[i] for name, pair in pairs.items()} for i in (0, 1))
        self._values.append(self._metric.per_sample(given, target, size))

    @property
    def value(self) -> float | None:
        """The metric, in its unit; ``None`` where there is no second sample to give it to."""
        if not self._values:
            return None
        return float(np.concatenate(self._values).mean()) * self._metric.scale.factor


def _filled(first: Array, second: Array) -> tuple[Array, ...]:
    """Return arrays of samples in one shape; the single row of a sample may be its own axis."""
    rank = max(first.ndim, second.ndim)
    return filled(*(a[(None,) * (rank - a.ndim)] for a in (first, second)))
