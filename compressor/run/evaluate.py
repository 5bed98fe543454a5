"""Evaluate a model on data, and hand samples of a run's data to passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from compressor.calibration.portions import Portions
from compressor.errors import DataError, ModelError
from compressor.graph.output_parts import OutputParts
from compressor.graph.values import main_values
from compressor.models.torch.lowering import example_inputs
from compressor.progress import nobody_watches
from compressor.run.data import Data
from compressor.run.metrics.class_metrics import kl_sums
from compressor.run.metrics.judged import (
    ConstantAnswer,
    check_finite,
    judged_outputs,
    read_outputs,
    target_of,
)
from compressor.run.metrics.metrics import CONVERTED_AT_ONCE, MSE, Metric, first_of
from compressor.run.noise.signals import OutputSums, SignalSums, ratio_db, same_rows
from compressor.run.verdicts.decisions import Decisions, decisions_of, joined
from compressor.types.carrier import Carrier, Runner
from compressor.types.layers import Layer
from compressor.types.tensors import (
    Array,
    Batch,
    TensorSpec,
    cut,
    filled,
    fixed_batch,
    made_batch,
    picked,
    samples_in,
)

_SIGNAL_SAMPLES = 64
_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Evaluation:
    """A model's results on the evaluation data.

    Attributes:
        metric: as in ``report.json``.
        per_sample: the metric's value for each sample, ``[N]``.
        sqnr_db: signal over the difference from the float model's outputs, in dB, as
            :class:`OutputSums` has it; ``None`` where they are equal.
        agreement: percent of samples (of decisions) with the same largest output as the float
            model; ``None`` unless the metric is about classes.
        max_abs_diff: largest absolute difference of any output value.
        decisions: beside the float model's; ``None`` unless the metric is about classes.
        kl: mean Kullback-Leibler divergence from the float model, in nats a token; ``None`` unless
            the metric is the perplexity.
        constant: the float model's metric if it gave all samples the answer to the first, as
            :class:`~compressor.run.metrics.judged.ConstantAnswer` has it; ``None`` for others.
        zeros: the float model's metric if all its outputs were zero, which of ``mse`` is the mean
            square of what it is compared with; ``None`` for other models and metrics.
        copies: samples of which an earlier one is a copy, inputs and target; 0 for other models.
        unread: outputs that the metric does not look at, with the variance of their values over
            the squared difference from the float model's in dB; ``None`` where they are equal.
    """

    metric: dict[str, Any]
    per_sample: Array
    sqnr_db: float | None
    agreement: float | None
    max_abs_diff: float
    decisions: Decisions | None = None
    kl: float | None = None
    constant: float | None = None
    zeros: float | None = None
    copies: int = 0
    unread: Mapping[str, float | None] = field(default_factory=dict)

    def constant_drop(self, metric: Metric) -> float | None:
        """Return how much worse the metric is, at most, if all samples get one answer.

        ``None`` if that is not known. Of the user's own metric it is known if its values are right
        and wrong, 1 and 0: no answer is worse than one that is wrong for all samples.
        """
        if metric.code is not None and set(np.unique(self.per_sample)) == {0.0, 1.0}:
            return metric.drop(self.metric, {"value": 0.0 if metric.higher_is_better else 1.0})
        return None if self.constant is None else metric.drop(self.metric, {"value": self.constant})

    def as_json(self) -> dict[str, Any]:
        """Return all but the values of single samples."""
        return {
            "metric": self.metric,
            "sqnr_db": self.sqnr_db,
            "agreement": self.agreement,
            "max_abs_diff": self.max_abs_diff,
            "kl": self.kl,
            "constant": self.constant,
            "zeros": self.zeros,
            "copies": self.copies,
            "unread": dict(self.unread),
        }


def evaluate(
    candidate: Runner,
    reference: Runner,
    data: Data,
    metric: Metric,
    progress: Callable[[int], None] = nobody_watches,
    parts: OutputParts = (),
) -> Evaluation:
    """Evaluate ``candidate`` and compare its outputs with those of ``reference``.

    Outputs pair by position: artifacts may not know the float model's names.

    Args:
        parts: what each output is joined of, if that is known.

    Raises:
        DataError: an output is not finite, or the metric fails.
    """
    values: list[Array] = []
    of_zeros: list[Array] = []
    taken: list[Decisions | None] = []
    sums, worst = OutputSums(parts), 0.0
    divergence, constant = np.zeros(2), ConstantAnswer(metric)
    same = decisions = seen = copies = 0
    contents: set[bytes] = set()
    names: list[str] = []
    read: set[str] = set()
    shares = metric.about_classes and metric.unit == "%"
    for batch in data.batches():
        size = samples_in(batch)
        outputs = candidate.run(batch)
        expected = outputs if candidate is reference else reference.run(batch)
        check_finite(outputs, seen, size, batch, exact=candidate is reference)
        expected = dict(zip(outputs, expected.values(), strict=True))
        pairs = {name: filled(array, expected[name]) for name, array in outputs.items()}
        if metric.against_float and metric.code is None:
            outputs, expected = ({n: pair[i] for n, pair in pairs.items()} for i in (0, 1))
        ours, theirs = zip(*pairs.values(), strict=True)
        sums.add(theirs, ours)
        worst = max(worst, *(largest_gap(a, b) for a, b in pairs.values()))
        judged, expected = (judged_outputs(batch, o, metric) for o in (outputs, expected))
        target = target_of(batch, data.target, expected, metric)
        names, read = list(outputs), read_outputs(outputs, judged, target, metric)
        values.append(metric.per_sample(judged, target, size))
        if candidate is reference and metric.code is not None and not seen:
            metric.check_repeats(values[0], judged, target)
        if candidate is reference:
            constant.add(judged, target, size)
            if metric.name == MSE.name:
                nothing = {name: np.zeros_like(array) for name, array in judged.items()}
                of_zeros.append(metric.per_sample(nothing, target, size))
            known = [c for i in range(size) if (c := _content(cut(batch, i, i + 1)))]
            before = len(contents)
            contents.update(known)
            copies += len(known) - (len(contents) - before)
        taken.append(decisions_of(judged, expected, target, metric))
        if metric.exponential and metric.code is None:
            divergence += kl_sums(first_of(judged), first_of(expected), target)
        if shares:
            first, other = next(iter(judged.values())), next(iter(expected.values()))
            equal = first.argmax(axis=-1) == other.argmax(axis=-1)
            if metric.of_tokens:
                equal = equal[other.any(axis=-1)]
            same, decisions = same + int(equal.sum()), decisions + equal.size
        # Before the next run needs the memory: the scores of large vocabularies take most.
        del outputs, expected, pairs, ours, theirs, judged, target
        seen += size
        progress(seen)
    if not values:
        raise DataError("evaluation data", "has no samples", "check the source")
    per_sample = metric.settled(np.concatenate(values))
    return Evaluation(
        metric=metric.summary(per_sample),
        per_sample=per_sample,
        sqnr_db=sums.sqnr_db,
        agreement=100.0 * same / decisions if decisions else None,
        max_abs_diff=worst,
        decisions=joined(taken),
        kl=float(divergence[0] / divergence[1]) if divergence[1] else None,
        constant=constant.value,
        zeros=float(np.concatenate(of_zeros).mean()) if of_zeros else None,
        copies=copies,
        unread={n: db for n, db in zip(names, sums.spread_db, strict=False) if n not in read},
    )


def largest_gap(first: Array, second: Array) -> float:
    """Return the largest difference of two arrays of one shape; in parts, as they are widened."""
    flat, other, step = first.reshape(-1), second.reshape(-1), CONVERTED_AT_ONCE
    parts = [slice(start, start + step) for start in range(0, flat.size, step)]
    gaps = (np.abs(flat[part].astype(np.float64) - other[part]).max() for part in parts)
    return max(map(float, gaps), default=0.0)


def outputs_of(runner: Runner, batch: Batch, size: int) -> Batch:
    """Run a batch, ``size`` samples at a time, which takes less memory; return its outputs."""
    count = samples_in(batch)
    if count <= size:
        return runner.run(batch)
    parts: list[Batch] = []
    for start in range(0, count, size):
        part = cut(batch, start, start + size)
        parts.append(runner.run(part))
        rows = {len(a) if a.ndim else 0 for a in parts[-1].values()}
        if rows != {samples_in(part)}:  # an output is not one of samples
            return runner.run(batch)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def layer_signals(
    carrier: Carrier, baseline: Carrier, batches: Sequence[Batch]
) -> dict[str, float | None]:
    """Return for each layer the SQNR of its output against the float model's, in dB.

    Only layers whose output is a value of both main graphs appear: a runtime shows no others.

    Raises:
        ModelError: a layer gives NaN or infinity where the float model does not.
    """
    ours, theirs = main_values(carrier.graph()), main_values(baseline.graph())
    shared: list[Layer] = [
        layer for layer in carrier.layers() if layer.output in ours and layer.output in theirs
    ]
    taps = list(dict.fromkeys(layer.output for layer in shared))
    if not taps:
        return {}
    have, want = carrier.runner(taps), baseline.runner(taps)
    portions = Portions(lambda part: (have.run(part), want.run(part)), [carrier, baseline])
    sums = {name: SignalSums() for name in taps}
    for portion in portions.of_all([cut(batch, 0, _SIGNAL_SAMPLES) for batch in batches]):
        outputs, expected = portion.values
        for name in outputs.keys() & expected.keys() & sums.keys():
            count = samples_in(portion.batch)
            sums[name].add(expected[name], same_rows(expected[name], outputs[name], count))
        del portion, outputs, expected  # before the next run needs the memory
    return {layer.name: _sqnr(layer, sums[layer.output]) for layer in shared}


def _sqnr(layer: Layer, sums: SignalSums) -> float | None:
    if not sums.comparable:
        return None
    if not sums.finite:
        raise ModelError(
            f"layer {layer.name!r}",
            "returns NaN or infinity after this pass",
            "its range is too narrow: leave this layer out with a rule under layers",
        )
    return ratio_db(sums.signal, sums.error)


class CachingRunner:
    """Runs a model and caches its outputs by the content of the batch.

    The model is opened on demand, and can be closed in between.

    Args:
        opener: starts a runtime for the model.
        most: capacity of the cache in bytes.
        reads: names of the arrays that the model reads; others do not distinguish batches.
    """

    def __init__(
        self,
        opener: Callable[[], Runner],
        most: int = _CACHE_BYTES,
        reads: Collection[str] | None = None,
    ):
        self._opener = opener
        self._reads = reads
        self._open: Runner | None = None
        self._left = most
        self._outputs: dict[bytes, Batch] = {}

    @cached_property
    def runtime(self) -> str:
        """Name and version of what executes the model."""
        return self._runner.runtime

    @property
    def _runner(self) -> Runner:
        self._open = self._open or self._opener()
        return self._open

    def close(self) -> None:
        """Release the model's memory; the cache stays."""
        self._open = None

    def run(self, batch: Batch) -> Batch:
        """Return the outputs for a batch, which must not be modified."""
        key = _content(batch, self._reads)
        if key not in self._outputs:
            outputs = self._runner.run(batch)
            self._remember(key, outputs)
            return self._outputs.get(key, outputs)
        return self._outputs[key]

    def remember(self, batch: Batch, outputs: Batch) -> None:
        """Add outputs for a batch that were computed elsewhere."""
        self._remember(_content(batch, self._reads), outputs)

    def _remember(self, key: bytes, outputs: Batch) -> None:
        size = sum(array.nbytes for array in outputs.values())
        if key and key not in self._outputs and size <= self._left:
            self._left -= size
            # Copies: outputs of ONNX Runtime keep all of the memory that it ran in.
            self._outputs[key] = {name: array.copy() for name, array in outputs.items()}


def _content(batch: Batch, reads: Collection[str] | None = None) -> bytes:
    """Return what is equal for equal arrays of a batch; nothing where objects are among them.

    Args:
        reads: names of the arrays; by default all.
    """
    content = blake2b()
    for name in sorted(batch if reads is None else batch.keys() & reads):
        array = np.ascontiguousarray(batch[name])
        content.update(f"{name} {array.dtype} {array.shape}".encode())
        if array.dtype.kind == "O":
            return b""
        content.update(array.tobytes())
    return content.digest()


@dataclass(frozen=True)
class RunSamples:
    """The run's calibration data; see :class:`compressor.types.data.Samples`.

    Attributes:
        data: the calibration data, if there are any.
        seed: seed of the made-up batch if there are none.
        advance: called with the number of samples yielded so far.
        carrier: the model; states come from it.
    """

    inputs: Sequence[TensorSpec]
    data: Data | None
    seed: int
    advance: Callable[[int], None] = nobody_watches
    carrier: Carrier | None = None

    @property
    def made_up(self) -> bool:
        """There are no calibration data."""
        return self.data is None

    def probe(self, count: int) -> Batch:
        """Return the first samples, repeated if there are fewer than the model's fixed batch."""
        fixed = fixed_batch(self.inputs)
        size = fixed or count
        if self.data is None:
            return made_up_batch(self.inputs, size, self.seed)
        names = [i.name for i in self.inputs]
        batch = self.data.first(size)
        if fixed is None or self.data.feeds:
            return picked(batch, names)
        repeat = -(-size // samples_in(batch))
        return {n: np.concatenate([batch[n]] * repeat)[:size] for n in names}

    def batches(self) -> Iterator[Batch]:
        """Yield the calibration data, if there are any."""
        done = 0
        batches = iter(()) if self.data is None else self.data.batches()
        if self.data is not None and self.carrier is not None:
            batches = self.data.unrolled(self.carrier, batches)
        for batch in batches:
            yield batch
            done += samples_in(batch)
            self.advance(done)


def made_up_batch(inputs: Sequence[TensorSpec], count: int, seed: int) -> Batch:
    """Return random inputs: floats of a standard normal distribution, integers 0 and 1.

    Args:
        inputs: the model's inputs; dynamic axes get the lengths that lowering uses.
        count: number of samples, unless the model's batch is fixed.
    """
    batch_axis = inputs[0].shape[0] if inputs and inputs[0].shape else None
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for spec, example in zip(inputs, example_inputs(inputs).values(), strict=True):
        shape = [
            count if isinstance(d, str) and d == batch_axis else n
            for d, n in zip(spec.shape, example.shape, strict=True)
        ]
        dtype = np.dtype(spec.dtype)
        values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        made[spec.name] = np.asarray(values).astype(dtype)
    return made_batch(inputs, made)
