"""Metrics: one value a sample, so that every comparison can be paired."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compressor import catalog
from compressor.errors import DataError, SpecError, located
from compressor.graph.output_parts import OutputParts, named_parts, with_parts
from compressor.run.metrics.scores import UnfitError, numbers_first, scores_first
from compressor.run.verdicts.statistics import MOST_LOG, Scale, paired_difference
from compressor.spec.keys import MetricKeys
from compressor.types.tensors import Array, Batch

_LARGEST = float(np.finfo(np.float32).max)  # a history keeps values as float32
_ROUNDING = 1e-5  # of the largest value
_Z95 = 1.959963984540054
CONVERTED_AT_ONCE = 1 << 18  # values whose float64 copies take little memory
NOT_COUNTED = -100
_SEVERAL = 2  # stands for the size of an axis that a model leaves open


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        function: outputs and target to one value a sample, float64 ``[N]``.
        unit: ``%`` for shares, else empty.
        needs_labels: it cannot take the float model's outputs as the target.
        against_float: the target is the float model's output, not a label.
        exponential: per-sample values are logarithms; the mean is exponentiated.
        about_classes: it reads scores of classes, which :meth:`sampled` puts first, classes last.
        of_numbers: it reads numbers of classes, which :meth:`sampled` puts first.
        figure: for a figure of the whole corpus, makes one value a sample of what the function
            returns, ``[N, parts]``; their mean is the figure.
        of_tokens: tokens that the attention mask leaves out do not count.
        shows_worst: the worst sample is reported beside the mean.
        of_directions: it compares directions, which a single number does not have.
        output_parts: what each output is joined of, in the order of the outputs; each counts as an
            output, and one without parts does not count. Empty where outputs count as a whole.
        bounds: what no mean of the values lies outside of, before the unit; intervals end there.
        code: the user's own function behind it.
        digest: of what else decides the values, such as files of the model.
    """

    name: str
    function: Callable[[Batch, Any], Array]
    higher_is_better: bool = True
    unit: str = ""
    needs_labels: bool = True
    against_float: bool = False
    exponential: bool = False
    about_classes: bool = False
    of_numbers: bool = False
    figure: Callable[[Array], Array] | None = None
    of_tokens: bool = False
    shows_worst: bool = False
    of_directions: bool = False
    output_parts: OutputParts = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    code: Callable[..., Any] | None = None
    digest: str = ""

    def per_sample(self, outputs: Batch, target: Any, samples: int) -> Array:
        """Return one value a sample, float64 ``[samples]``, or the parts of a figure.

        Raises:
            DataError: the function fails, or returns something else.
        """
        try:
            values = np.asarray(self.function(outputs, target), dtype=np.float64)
        except UnfitError as error:
            raise DataError(f"metric {self.name!r}", str(error), error.remedy) from error
        except (Exception, SystemExit) as error:  # the user's metric may raise anything
            raise DataError(
                f"metric {self.name!r}",
                f"failed ({type(error).__name__}: {error})",
                f"check that it fits the model's outputs ({', '.join(outputs)}) and the target",
            ) from error
        if values.size == samples == 1:
            values = values.reshape(1)
        rows = values.shape[:1] if self.figure and values.ndim == 2 else values.shape
        if rows != (samples,) or not np.isfinite(values).all():
            raise DataError(
                f"metric {self.name!r}",
                f"returned shape {list(values.shape)} for {samples} samples"
                if rows != (samples,)
                else "returned NaN or infinity",
                "return one finite number a sample",
            )
        if np.abs(values).max(initial=0.0) > _LARGEST:
            largest = values.flat[np.abs(values).argmax()]
            raise DataError(
                f"metric {self.name!r}",
                f"returned {largest:.3g}, too large for sums of squares",
                f"return numbers up to {_LARGEST:.0e}, or their logarithms",
            )
        return values

    def check_repeats(self, values: Array, outputs: Batch, target: Any) -> None:
        """Check that a function of the user's gives the same values for the same arguments again.

        Otherwise its values say nothing of a model: it draws random numbers, or counts its calls.

        Raises:
            DataError: they differ by more than float32 rounds.
        """
        again = self.per_sample(outputs, target, len(values))
        if not np.allclose(values, again, rtol=0.0, atol=_ROUNDING * np.abs(values).max()):
            raise DataError(
                f"metric {self.name!r}",
                "returned other values for the same outputs when it was called again",
                "let it depend on its arguments alone, and seed what it draws in each call",
            )

    def difference(self, base: Array, candidate: Array) -> dict[str, Any]:
        """Return how much worse a candidate's values are, by the paired test of the gate."""
        difference = paired_difference(self.settled(base), self.settled(candidate), self.scale)
        return difference.as_json()

    def sampled(self, outputs: Batch, samples: int) -> Batch:
        """Return the outputs with an axis of samples, which built-in metrics are about.

        Where none has one, all are of the sample if there is only one.

        Raises:
            DataError: there is none.
        """
        if self.output_parts:
            outputs = named_parts(outputs, self.output_parts)
        chosen = {n: a for n, a in outputs.items() if a.ndim and len(a) == samples}
        if not chosen and samples == 1:
            chosen = {name: array[None] for name, array in outputs.items()}
        if chosen:
            return self._read(chosen)
        name, array = next(iter(outputs.items()))
        raise self._without_samples(f"{samples} samples", name, array.shape)

    def check_fit(
        self,
        shapes: Mapping[str, Sequence[object] | None],
        target: Array | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Check that outputs of these shapes, and the target of one sample, fit the metric.

        A user's own metric is not checked.

        Args:
            shapes: of the outputs, with the axis of samples; an axis that is no number is open.
            target: of one sample, ``[1, ...]``; ``None`` without labels.
            dtypes: of the outputs; those that are not named are floats.

        Raises:
            DataError: they are not.
        """
        if self.code is not None or not shapes:
            return
        if all(shape is not None and not shape for shape in shapes.values()):
            for name in shapes:
                raise self._without_samples("samples", name, ())
        types = {name: t for name, t in (dtypes or {}).items() if t in np.sctypeDict}
        outputs: Batch = {
            name: np.broadcast_to(
                np.ones((), types.get(name, "float64")),
                (1, *(d if isinstance(d, int) else _SEVERAL for d in shape[1:])),
            )
            for name, shape in with_parts(shapes, self.output_parts).items()
            if shape
        }
        outputs = self._read(outputs)
        for name in outputs:
            if self.of_directions and single_number(shapes[name]):
                raise DataError(
                    f"metric {self.name!r}",
                    f"says nothing about output {name!r}, which has one number a sample: the "
                    "cosine of two numbers of one sign is 1",
                    "use mse, or a metric of your own",
                )
        if target is None and not (self.about_classes and self.against_float):
            return
        sizes = shapes[next(iter(outputs))] if outputs else None
        if sizes and all(isinstance(size, int) for size in sizes[1:]):
            self.per_sample(outputs, outputs if target is None else target, 1)

    def _read(self, outputs: Batch) -> Batch:
        """Return the outputs that are read, those that alone decide first."""
        if self.of_numbers:
            return numbers_first(outputs)
        if self.about_classes:
            return scores_first(outputs)
        return outputs

    def _without_samples(self, samples: str, name: str, shape: Sequence[object]) -> DataError:
        return DataError(
            f"metric {self.name!r}",
            f"needs an output with an axis of {samples}, and {name!r} has shape {list(shape)}",
            "set batch: 1 or samples: feeds, so that all outputs of a run are one sample, or give "
            "a metric of your own",
        )

    def settled(self, values: Array) -> Array:
        """Return one value per sample from the results of :meth:`per_sample` for all samples.

        Raises:
            DataError: the figure is not defined for them.
        """
        if self.figure is None or values.ndim == 1:
            return values
        try:
            return self.figure(values)
        except ValueError as error:
            raise DataError(
                f"metric {self.name!r}", str(error), "give other samples, or another metric"
            ) from error

    @property
    def scale(self) -> Scale:
        """What makes a metric of per-sample values."""
        share, figure = self.unit == "%", self.figure is not None
        counts, factor = share or self.code is not None, 100.0 if share else 1.0
        return Scale(factor, self.exponential, self.higher_is_better, counts, share and figure)

    def summary(self, values: Array) -> dict[str, Any]:
        """Summarise per-sample values, or parts, as in ``report.json``.

        The interval is Wilson's for right/wrong values (Wilson 1927), else the mean's normal
        interval within the metric's bounds. Only shares and the user's own metrics can be right
        or wrong: a squared error of 0 in every sample is not a count.
        """
        values, scale = self.settled(values), self.scale.factor
        mean = float(values.mean())
        low, high = np.clip(_interval(values, counted=self.scale.counts), *self.bounds).tolist()
        if self.exponential:
            mean, low, high = (math.exp(min(x, MOST_LOG)) for x in (mean, low, high))
        return {
            "name": self.name,
            "value": mean * scale,
            "samples": int(values.size),
            "ci95": [low * scale, high * scale],
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            **({"worst": float(values.min()) * scale} if self.shows_worst else {}),
        }

    def drop(self, baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> float:
        """Return how much worse the candidate is; positive is worse whatever the direction."""
        difference = float(baseline["value"]) - float(candidate["value"])
        return difference if self.higher_is_better else -difference


def _interval(values: Array, *, counted: bool) -> tuple[float, float]:
    n, mean = values.size, float(values.mean())
    if counted and np.isin(values, (0.0, 1.0)).all():
        z2 = _Z95**2
        centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)
    half = _Z95 * float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return mean - half, mean + half


def single_number(shape: Sequence[object] | None) -> bool:
    """Return whether an output ``[N, ...]`` is known to hold one number a sample."""
    return shape is not None and len(shape) > 0 and all(size == 1 for size in shape[1:])


def first_of(outputs: Batch) -> Array:
    """Return the first output."""
    return next(iter(outputs.values()))


def _plain(outputs: Any) -> Any:
    """Return the array of a single output; several outputs, and labels, are as they are."""
    single = isinstance(outputs, dict) and len(outputs) == 1
    return first_of(outputs) if single else outputs


def _pairs(outputs: Batch, target: Any) -> Sequence[tuple[Array, Array]]:
    targets = target if isinstance(target, dict) else {next(iter(outputs)): target}
    pairs = []
    for name, expected in targets.items():
        ours, theirs = (np.asarray(a) for a in (outputs[name], expected))
        if ours.size != theirs.size or len(ours) != len(theirs):
            raise UnfitError(
                f"the target has shape {list(theirs.shape)} and output {name!r} {list(ours.shape)}",
                "give a target of the output's shape; without data.evaluation.target, outputs are "
                "compared with the float model's",
            )
        rows, wide = len(ours), np.float64
        pairs.append((ours.astype(wide).reshape(rows, -1), theirs.astype(wide).reshape(rows, -1)))
    return pairs


def _mse(outputs: Batch, target: Any) -> Array:
    pairs = _pairs(outputs, target)
    means = [np.square(a - b).sum(axis=1) / max(a.shape[1], 1) for a, b in pairs]
    return np.asarray(np.mean(means, axis=0))


def cosines(first: Array, second: Array) -> Array:
    """Return the cosine of each pair of rows, ``[N]``; zeros have no direction.

    Args:
        first: float64 ``[N, width]``, as ``second``.
    """
    lengths = np.linalg.norm([first, second], axis=2)
    norms, dot = lengths.prod(axis=0), (first * second).sum(axis=1)
    same = (lengths == 0.0).all(axis=0).astype(np.float64)
    return np.asarray(np.divide(dot, norms, out=same, where=norms > 0))


def _cosine(outputs: Batch, target: Any) -> Array:
    return np.asarray(np.mean([cosines(a, b) for a, b in _pairs(outputs, target)], axis=0))


SHARES = (0.0, 1.0)
CORRELATIONS = (-1.0, 1.0)
ERRORS = (0.0, math.inf)

MSE = Metric("mse", _mse, higher_is_better=False, needs_labels=False, bounds=ERRORS)


COSINE = Metric("cosine", _cosine, needs_labels=False, of_directions=True, bounds=CORRELATIONS)


def kept_scale(metric: Mapping[str, Any], factor: float, *, exponential: bool) -> Scale:
    """Return the scale of a metric as a report or a history keeps it.

    Args:
        metric: its ``name``, ``unit`` and ``higher_is_better``.
    """
    name, share = metric["name"], metric["unit"] == "%"
    known = name in catalog.names("metric")
    decides = share and known and catalog.load("metric", name).figure is not None
    return Scale(factor, exponential, metric["higher_is_better"], share or not known, decides)


def resolve_metric(
    keys: str | MetricKeys | None,
    has_target: bool,
    symbol: Callable[[str, str], Any],
    where: str,
    *,
    numbers: bool = False,
    parts: OutputParts = (),
) -> Metric:
    """Return the metric of a spec.

    By default it is accuracy if there are labels; else the cosine, or where an output is one number
    a sample, which has no direction, the mean squared error.

    Args:
        symbol: finds the user's function by its reference; the second argument is the key.
        numbers: an output is one number a sample.
        parts: what the outputs are joined of, for metrics that compare them with the float model's.

    Raises:
        SpecError: it is unknown, does not import, or needs labels that are not there.
    """
    higher = True
    if isinstance(keys, MetricKeys):
        higher, keys = keys.higher_is_better, keys.name or keys.function
    if keys is None:
        keys = "accuracy" if has_target else "mse" if numbers else "cosine"
    if ":" in keys:
        reference = keys
        with located(where):
            function = symbol(reference, "metric")

        def call(outputs: Batch, target: Any) -> Array:
            own = deepcopy((_plain(outputs), _plain(target)))  # it may change them in place
            return np.asarray(function(*own))

        return Metric(reference, call, higher, code=function)
    with located(where):
        metric: Metric = catalog.load("metric", keys)
    if metric.about_classes or metric.of_tokens:
        parts = ()
    if metric.against_float:
        return replace(metric, output_parts=parts)
    if has_target:
        return metric
    if metric.needs_labels:
        raise SpecError(
            f"metric {keys!r}",
            "needs labels, and data.evaluation has no target",
            "name the target, or use agreement, mse or cosine, which compare with the float model",
            where=where,
        )
    return replace(metric, against_float=True, output_parts=parts)
