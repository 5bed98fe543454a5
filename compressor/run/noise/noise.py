"""The noise that compression adds to each layer, measured on a few samples.

Every layer is run alone on its float input, so that noise of earlier layers does not count. Then
the float model is run with that one layer's error added to its output, which shows how much of it
reaches the model's output. That takes one run of a few samples for each layer.

A value that several nodes read stays quantized when one of them is left out. So its noise is not
attributed to any layer, but counted separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial

import numpy as np

from compressor.calibration.portions import Portion, Portions
from compressor.graph.costs import batch_macs
from compressor.graph.isolated import Cut, Isolated, cut_at, isolated, readers, with_offsets
from compressor.graph.output_parts import OutputParts
from compressor.graph.values import main_values
from compressor.models.onnx.ort_runner import runner_of
from compressor.run.metrics.judged import judged_outputs
from compressor.run.metrics.metric_effect import MetricEffect
from compressor.run.noise.signals import OutputSums, SignalSums
from compressor.types.carrier import Carrier, Runner
from compressor.types.tensors import Array, Batch, Feed, cut, fixed_batch, samples_in

_MOST_MACS = 2e11  # some seconds of a core
_ROUNDING = 1e-10  # noise over signal, -100 dB


@dataclass(frozen=True)
class Noise:
    """Noise-to-signal ratios of powers; ``None`` where one is not known.

    Attributes:
        whole: of a layer's output (of its weight if the model cannot be run).
        own: the same without the noise of a value that others read, too.
        reached: of the model's outputs, if only ``own`` is added; see :class:`OutputSums`.
        effect: its effect on the metric, the mean over samples.
    """

    whole: float | None = None
    own: float | None = None
    reached: float | None = None
    effect: float | None = None

    @property
    def counted(self) -> float:
        """The ratio by which layers are compared."""
        return (self.own if self.reached is None else self.reached) or 0.0

    def less(self, other: Noise) -> Noise:
        """Return this noise minus the noise that was there before."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Noise(
            *(None if mine is None else max(0.0, mine - (theirs or 0.0)) for mine, theirs in pairs)
        )


@dataclass(frozen=True)
class ModelNoise:
    """The noise of a model's layers, by name, and of values that several nodes read.

    ``reason`` is why nothing is known, if the runtime refused parts of the model.
    """

    layers: Mapping[str, Noise]
    values: Mapping[str, Noise]
    reason: str = ""

    def less(self, other: ModelNoise) -> ModelNoise:
        """Return this noise minus the noise that was there before."""
        return ModelNoise(
            {n: noise.less(other.layers.get(n, Noise())) for n, noise in self.layers.items()},
            {n: noise.less(other.values.get(n, Noise())) for n, noise in self.values.items()},
            self.reason or other.reason,
        )


def measured_noise(
    carrier: Carrier,
    baseline: Carrier,
    batches: Sequence[Batch],
    effect: MetricEffect | None = None,
    parts: OutputParts = (),
) -> ModelNoise:
    """Return each layer's noise on its float input.

    How much of it reaches the output is omitted if that would take long. Layers that do not have
    the same shape in both models are omitted.

    Args:
        parts: what each output is joined of, if that is known.
    """
    shapes = {layer.name: layer.shape for layer in baseline.layers()}
    same = [layer for layer in carrier.layers() if shapes.get(layer.name) == layer.shape]
    alone = isolated(carrier.graph(), same, main_values(baseline.graph()))
    if not alone.layers:
        return ModelNoise({}, {})
    measuring = _Measuring(baseline, alone, effect, parts)
    portions = Portions(measuring.values, [carrier, baseline])
    left, works = _MOST_MACS, dict[tuple[tuple[int, ...], ...], float]()
    for batch in batches:
        shape = tuple(array.shape for array in batch.values())
        if shape not in works:
            works[shape] = batch_macs(baseline, batch) * len(measuring.errors)
        work = works[shape]
        size = samples_in(batch)
        whole = isinstance(batch, Feed) or fixed_batch(baseline.inputs) is not None
        few = size if work <= left else 0 if whole else int(size * left / work)
        left -= work * few / size
        for start, stop in ((0, few), (few, size)):
            for portion in portions.of(cut(batch, start, stop)) if start < stop else ():
                measuring.add(portion, reaches=start < few)
                del portion  # before the next run needs the memory
    return measuring.noise()


@dataclass
class _Error:
    """An error that can be added to a value of the float model, as it shows in portions of samples.

    Attributes:
        name: the layer, or the value itself.
        value: the value that the error is of.
        form: the value of the compressed model that has it.
        layer: it is a layer's, not that of a value that others read, too.
        reached: of the model's outputs.
        whole: of the layer's output, with the noise of values that others read.
        own: the same without that noise.
        effect: its effect on the metric, the sum over ``samples``.
    """

    name: str
    value: str
    form: str
    layer: bool
    reached: OutputSums
    whole: SignalSums = field(default_factory=SignalSums)
    parted: SignalSums | None = None
    effect: float = 0.0
    samples: int = 0
    comparable: bool = True

    def add(self, exact: Batch, have: Batch, want: Batch) -> Callable[[], Array] | None:
        """Add a portion's error to the sums; return what computes it, or ``None`` without one.

        Args:
            want: the outputs of float layers that read rounded values.
        """
        float_value = want.get(self.value) if self.layer else None
        float_value = exact.get(self.value) if float_value is None else float_value
        value = have.get(self.form)
        if float_value is None or value is None:  # it is the same in all portions
            return None
        self._add(exact[self.value], value, float_value)
        return partial(np.subtract, value, float_value) if self.comparable else None

    def _add(self, exact: Array, value: Array, float_value: Array) -> None:
        if self.layer and float_value is exact:
            self.whole.add(exact, value)
            self.comparable = self.whole.comparable and self.whole.finite
            return
        finite = np.isfinite(float_value).all() and np.isfinite(value).all()
        self.comparable = self.comparable and float_value.shape == value.shape and bool(finite)
        if self.layer and self.comparable:
            self.parted = self.parted or SignalSums()
            self.whole.add(exact, value)
            self.parted.add(exact, exact + (value - float_value))

    @property
    def own(self) -> SignalSums:
        """Sums of the error without the noise of values that others read, too."""
        return self.parted or self.whole

    @property
    def rounding(self) -> bool:
        """Whether it is the rounding of float32, as after fusion, which changes no output."""
        ratio = self.own.ratio if self.layer else None
        return ratio is not None and ratio < _ROUNDING

    def noise(self) -> Noise:
        """Return the ratios of the sums."""
        effect = self.effect / self.samples if self.samples else None
        if not self.layer:
            return Noise(reached=self.reached.ratio, effect=effect)
        return Noise(self.whole.ratio, self.own.ratio, self.reached.ratio, effect)


class _Measuring:
    """Runs the float model, the compressed layers alone, and float layers on rounded values.

    Args:
        alone: the compressed model's layers, cut out.
    """

    def __init__(
        self, baseline: Carrier, alone: Isolated, effect: MetricEffect | None, parts: OutputParts
    ):
        inputs = {i.name for i in baseline.inputs}
        outputs = [layer.output for layer in alone.layers]
        self.errors = [
            _Error(x.name, x.output, x.output, True, OutputSums(parts)) for x in alone.layers
        ]
        self.errors += [
            _Error(name, name, form, False, OutputSums(parts))
            for name, form in alone.shared.items()
            if name not in inputs
        ]
        taps = dict.fromkeys([*alone.cut.inputs, *outputs])
        self._shared, self._effect = alone.shared, effect
        self._baseline = baseline
        self._float = baseline.runner([t for t in taps if t not in inputs])
        self._compressed = _Part(alone.cut)
        # Other float layers give what they do in the whole model.
        again = readers(baseline.graph(), outputs, alone.cut.inputs, alone.shared)
        part = cut_at(baseline.graph(), list(alone.cut.inputs), again) if again else None
        self._again = None if part is None else _Part(part)
        self._reaching: _Reaching | None = None

    def values(self, batch: Batch) -> tuple[Batch, Batch, Batch]:
        """Return the float model's values, the compressed layers', and those of float layers."""
        exact = {**batch, **self._float.run(batch)}
        have = self._compressed.run(exact)
        if self._again is None:
            return exact, have, {}
        rounded = {name: have[form] for name, form in self._shared.items()}
        return exact, have, self._again.run({**exact, **rounded})

    def add(self, portion: Portion, *, reaches: bool) -> None:
        """Add a portion's errors to the sums.

        Args:
            reaches: find out how much of each error reaches the output, too.
        """
        errors = [(error, error.add(*portion.values)) for error in self.errors]
        if not reaches:
            return
        if self._reaching is None:
            self._reaching = _Reaching(self._baseline, [e.value for e in self.errors], self._effect)
        self._reaching.add(portion.batch, errors)

    def noise(self) -> ModelNoise:
        """Return the noise of all samples so far."""
        comparable = [e for e in self.errors if e.comparable]
        return ModelNoise(
            {e.name: e.noise() for e in comparable if e.layer},
            {e.name: e.noise() for e in comparable if not e.layer},
        )


class _Part:
    """A part of a model, started."""

    def __init__(self, cut: Cut):
        self._inputs = cut.inputs
        self._dtypes = {v.name: v.dtype for v in cut.model.graph.inputs}
        self._runner = runner_of(cut.model, (), arena=False)

    def run(self, exact: Batch) -> Batch:
        """Run it on the float model's values."""
        feed = dict(exact)
        for value, entry in self._inputs.items():
            dtype = self._dtypes[entry]
            feed[entry] = exact[value] if dtype is None else exact[value].astype(dtype.numpy())
        return self._runner.run(feed)


class _Reaching:
    """The float model, to each of whose values an error can be added."""

    def __init__(self, baseline: Carrier, values: Sequence[str], effect: MetricEffect | None):
        self._effect, self._seen = effect, 0
        model, self._offsets = with_offsets(baseline.graph(), list(dict.fromkeys(values)))
        dtypes = {v.name: v.dtype for v in model.graph.inputs}
        self._none = {
            name: np.zeros(1, dtype.numpy())
            for name in self._offsets.values()
            if (dtype := dtypes[name]) is not None
        }
        # No inner value outlives a run, so that the next one takes the same memory.
        self._runner: Runner = runner_of(model, ())

    def add(
        self, batch: Batch, errors: Sequence[tuple[_Error, Callable[[], Array] | None]]
    ) -> None:
        """Add to the errors' sums what a portion's errors change in the outputs."""
        feed = {**batch, **self._none}
        exact = self._runner.run(feed)
        size = samples_in(batch)
        effect_of = self._effect_of(batch, exact)
        for error, values in errors:
            if values is None or error.value not in self._offsets:
                continue
            noisy = exact
            if not error.rounding:
                noisy = self._runner.run({**feed, self._offsets[error.value]: values()})
            error.reached.add(list(exact.values()), [noisy[name] for name in exact])
            if effect_of is not None:
                error.effect, error.samples = error.effect + effect_of(noisy), error.samples + size
        self._seen += size

    def _effect_of(self, batch: Batch, exact: Batch) -> Callable[[Batch], float] | None:
        """Return the effect on the metric of noise in a portion's outputs, as a function."""
        if self._effect is None:
            return None
        metric = self._effect.metric
        effect_of = self._effect.relative_to(judged_outputs(batch, exact, metric), self._seen)
        return lambda noisy: effect_of(judged_outputs(batch, noisy, metric))
