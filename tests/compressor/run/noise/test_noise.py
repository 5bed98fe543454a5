"""Noise of single layers: of a pass that changes them, and of rounding alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.run.metrics.metric_effect import MetricEffect
from compressor.run.metrics.metrics import MSE
from compressor.run.noise import noise
from compressor.run.noise.noise import ModelNoise, Noise, measured_noise
from compressor.types.tensors import Batch, Feed
from tests.compressor.tiny_project import sample_images, tiny_onnx


class Counted:
    """A runner that counts its runs."""

    runtime = "counted"

    def __init__(self, runner: object, runs: list[int]):
        self._runner, self._runs = runner, runs

    def run(self, batch: Batch) -> Batch:
        self._runs[0] += 1
        return self._runner.run(batch)  # type: ignore[attr-defined,no-any-return]  # a Runner


@pytest.mark.parametrize(("change", "reaches"), [(1e-3, True), (1e-6, False)])
def test_the_rounding_of_fused_layers_is_not_followed_to_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: float, reaches: bool
):
    onnx.save(tiny_onnx(), tmp_path / "model.onnx")
    carrier = open_onnx(tmp_path / "model.onnx", 21)
    layers = carrier.layers()
    changed: OnnxCarrier = carrier.with_weights(
        {layer.weight: carrier.weight(layer) * (1 + change) for layer in layers}
    )
    runs, runner_of = [0], noise.runner_of
    monkeypatch.setattr(noise, "runner_of", lambda *a, **k: Counted(runner_of(*a, **k), runs))
    measured = measured_noise(changed, carrier, [{"image": sample_images(3, 2)}]).layers
    assert len(measured) == len(layers)
    for found in measured.values():
        assert found.own is not None
        assert found.reached is not None
        assert 0 < found.own < 10 * change**2
        assert (found.reached > 0) == reaches
    # The layers, cut out; float layers read no rounded value, and give what they did in the model.
    assert runs[0] == 1 + 1 + (len(layers) if reaches else 0)


def test_the_runs_that_follow_noise_to_the_outputs_share_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    onnx.save(tiny_onnx(), tmp_path / "model.onnx")
    carrier = open_onnx(tmp_path / "model.onnx", 21)
    changed = carrier.with_weights({x.weight: carrier.weight(x) * 2 for x in carrier.layers()})
    opened = Mock(wraps=noise.runner_of)
    monkeypatch.setattr(noise, "runner_of", opened)
    measured_noise(changed, carrier, [{"image": sample_images(3, 2)}])
    # The layers, cut out, whose outputs stay while they run again; and the model with offsets.
    assert [call.kwargs.get("arena", True) for call in opened.mock_calls] == [False, True]


@pytest.fixture
def carrier(tmp_path: Path) -> OnnxCarrier:
    onnx.save(tiny_onnx(), tmp_path / "model.onnx")
    return open_onnx(tmp_path / "model.onnx", 21)


def scaled(carrier: OnnxCarrier, factor: float, *names: str) -> OnnxCarrier:
    """Return the model with the weights and biases of some layers multiplied, of all without."""
    chosen = [x for x in carrier.layers() if not names or x.name in names]
    changed: OnnxCarrier = carrier.with_weights(
        {
            tensor: carrier.tensors()[tensor].read() * factor
            for x in chosen
            for tensor in (x.weight, x.weight.replace("weight", "bias"))
        }
    )
    return changed


def test_a_layer_that_writes_a_tenth_more_has_a_hundredth_of_noise(carrier: OnnxCarrier):
    """On its float input; in the last layer all of it reaches the output, and its error is known.

    What reaches the output is measured of all portions together, and so is the metric.
    """
    batches = [{"image": sample_images(3, 2)}, {"image": sample_images(4, 1)}]
    effect = MetricEffect(MSE, None)
    found = measured_noise(scaled(carrier, 1.1), carrier, batches, effect)
    assert (found.values, found.reason) == ({}, "")
    assert list(found.layers) == [x.name for x in carrier.layers()]
    for each in found.layers.values():
        assert each.whole == each.own == pytest.approx(0.01, rel=1e-4)
    last = found.layers[carrier.layers()[-1].name]
    assert last.reached == pytest.approx(0.01, rel=1e-4)
    outputs = [carrier.runner().run(batch)["logits"] for batch in batches]
    error = [np.square(0.1 * row).mean() for batch in outputs for row in batch]
    assert last.effect == pytest.approx(np.mean(error), rel=1e-4)


def test_layers_of_another_shape_are_left_out(
    carrier: OnnxCarrier, monkeypatch: pytest.MonkeyPatch
):
    batches = [{"image": sample_images(3, 2)}]
    first, *others = carrier.layers()
    narrow = carrier.with_weights({})
    monkeypatch.setattr(narrow, "layers", lambda: [replace(first, shape=(1, 2)), *others])
    assert list(measured_noise(carrier, narrow, batches).layers) == [x.name for x in others]
    monkeypatch.setattr(narrow, "layers", list)
    assert measured_noise(carrier, narrow, batches) == ModelNoise({}, {})


@pytest.mark.parametrize(
    ("share", "followed"),
    [(1.0, 8), (0.99, 7), (0.5, 4), (0.2, 1), (0.124, 0)],
)
def test_noise_is_followed_to_the_outputs_of_as_many_samples_as_there_is_time_for(
    carrier: OnnxCarrier, monkeypatch: pytest.MonkeyPatch, share: float, followed: int
):
    """The noise of layers alone is that of all samples, however few are followed."""
    batches = [{"image": sample_images(i, 4)} for i in (3, 4)]
    other = scaled(carrier, 1.1)
    whole = measured_noise(other, carrier, batches)
    work = noise.batch_macs(carrier, batches[0]) * len(carrier.layers())
    monkeypatch.setattr(noise, "_MOST_MACS", 2 * share * work)
    reaching = noise._Reaching.add
    seen: list[int] = []

    def counted(self: object, batch: Batch, errors: object) -> None:
        seen.append(len(batch["image"]))
        reaching(self, batch, errors)  # type: ignore[arg-type]

    monkeypatch.setattr(noise._Reaching, "add", counted)
    found = measured_noise(other, carrier, batches)
    assert sum(seen) == followed
    for name, each in found.layers.items():
        assert each.own == pytest.approx(whole.layers[name].own, rel=1e-6)
        assert (each.reached is None) is (followed == 0)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(("share", "followed"), [(2.0, 2), (1.5, 1), (0.9, 0)])
def test_a_run_that_cannot_be_cut_is_followed_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool, share: float, followed: int
):
    """A feed was followed whatever time there was, and its layers ran twice."""
    onnx.save(tiny_onnx(batch=2 if fixed else "batch"), tmp_path / "model.onnx")
    carrier = open_onnx(tmp_path / "model.onnx", 21)
    batch: Batch = {"image": sample_images(3, 2)}
    work = noise.batch_macs(carrier, batch) * len(carrier.layers())
    monkeypatch.setattr(noise, "_MOST_MACS", share * work)
    adding, added = noise._Measuring.add, []

    def counted(self: object, portion: object, *, reaches: bool) -> None:
        added.append(reaches)
        adding(self, portion, reaches=reaches)  # type: ignore[arg-type]

    monkeypatch.setattr(noise._Measuring, "add", counted)
    given = batch if fixed else Feed(batch)
    found = measured_noise(scaled(carrier, 1.1), carrier, [given, given]).layers
    assert added == [True] * followed + [False] * (2 - followed)
    for each in found.values():
        assert (each.reached is None) is (not followed)
        assert each.own == pytest.approx(0.01, rel=1e-4)


def test_what_was_there_before_is_taken_off():
    mine, before = Noise(0.3, 0.2, None, 0.5), Noise(0.1, 0.4, 0.2, None)
    assert mine.less(before) == Noise(pytest.approx(0.2), 0.0, None, 0.5)
    model = ModelNoise({"a": mine, "b": mine}, {"c": mine, "d": mine})
    found = model.less(ModelNoise({"a": before}, {"c": before}, "no operator"))
    assert found.layers == {"a": mine.less(before), "b": mine}
    assert found.values == {"c": mine.less(before), "d": mine}
    assert found.reason == "no operator"
    assert ModelNoise({}, {}, "mine").less(found).reason == "mine"


@pytest.mark.parametrize(
    ("known", "counted"),
    [(Noise(), 0.0), (Noise(0.3, 0.2), 0.2), (Noise(0.3, 0.2, 0.1), 0.1), (Noise(0.3), 0.0)],
)
def test_layers_are_compared_by_what_reaches_the_outputs_where_it_is_known(
    known: Noise, counted: float
):
    assert known.counted == counted
