"""The effect of noise on a metric: of answers near another one, and of outputs that it reads."""

from __future__ import annotations

import numpy as np
import pytest

from compressor.run.metrics import metric_effect
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.run.metrics.metric_effect import MetricEffect
from compressor.run.metrics.metrics import MSE, Metric
from compressor.types.tensors import Batch

RNG = np.random.default_rng(0)


def moved(batch: Batch, name: str, noise: np.ndarray) -> Batch:
    return {**batch, name: (batch[name] + noise).astype(np.float32)}


def test_classes_feel_what_may_change_an_answer():
    effect = MetricEffect(ACCURACY, None)
    sure = {"y": np.array([[20.0, 0.0, 0.0]], np.float32)}
    unsure = {"y": np.array([[1.0, 0.9, 0.0]], np.float32)}
    noise = np.array([[-0.2, 0.2, 0.0]])
    assert effect.relative_to(sure)(sure) == 0.0
    assert effect.relative_to(unsure)(moved(unsure, "y", noise)) > 1e-3
    assert effect.relative_to(sure)(moved(sure, "y", noise)) < 1e-6
    # A shift of all scores changes no answer.
    assert effect.relative_to(unsure)(moved(unsure, "y", np.full((1, 3), 5.0))) == pytest.approx(0)


def test_small_noise_counts_by_its_power():
    effect = MetricEffect(ACCURACY, None)
    exact = {"y": RNG.standard_normal((8, 10)).astype(np.float32)}
    noise = 0.05 * RNG.standard_normal((8, 10))
    one, twice = (effect.relative_to(exact)(moved(exact, "y", k * noise)) for k in (1, 2))
    assert twice / one == pytest.approx(4, rel=0.1)


def test_outputs_that_the_metric_does_not_read_do_not_count():
    exact = {name: RNG.standard_normal((4, 5)).astype(np.float32) for name in ("boxes", "scores")}
    noise = RNG.standard_normal((4, 5))
    scored = Metric("scored", lambda out, _: (out["scores"] > 0).mean(axis=1))
    effect = MetricEffect(scored, np.zeros(4))
    assert effect.relative_to(exact)(moved(exact, "boxes", 9 * noise)) == 0.0
    assert effect.relative_to(exact)(moved(exact, "scores", 9 * noise)) > 0.0
    first = MetricEffect(ACCURACY, None)  # reads the first output alone
    assert first.relative_to(exact)(moved(exact, "scores", 9 * noise)) == 0.0


def test_targets_belong_to_their_samples():
    targets = np.arange(12, dtype=np.float32).reshape(6, 2)
    effect, noise = MetricEffect(MSE, targets), np.ones((2, 2))
    exact = {"y": targets[4:]}
    assert effect.relative_to(exact, first=4)(moved(exact, "y", noise)) == pytest.approx(2.0)
    exact = {"y": targets[:2]}
    assert effect.relative_to(exact)(moved(exact, "y", noise)) == pytest.approx(2.0)
    exact = {"y": targets[[5, 0]]}  # samples beyond the last begin anew
    assert effect.relative_to(exact, first=5)(moved(exact, "y", noise)) == pytest.approx(2.0)


def test_without_targets_the_float_model_s_outputs_are():
    exact = {"y": np.arange(4, dtype=np.float32).reshape(2, 2)}
    effect_of = MetricEffect(MSE, None).relative_to(exact)
    assert effect_of(moved(exact, "y", np.array([[1.0, 1.0], [2.0, 0.0]]))) == pytest.approx(3.0)


def test_divergences_are_means_over_decisions_and_sums_over_samples():
    exact, noisy = RNG.standard_normal((2, 3, 5, 4)).astype(np.float32)
    wanted = 0.0
    for ours, theirs in zip(exact.reshape(-1, 4), noisy.reshape(-1, 4), strict=True):
        p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum() for x in (ours, theirs))
        wanted += (p * np.log(p / q)).sum() / 5
    found = MetricEffect(ACCURACY, None).relative_to({"y": exact})({"y": noisy})
    assert found == pytest.approx(wanted)


def test_scores_may_be_large_and_unlike():
    exact = {"y": np.array([[1000.0, 1000.0], [-1000.0, -1000.0]], np.float32)}
    noisy = moved(exact, "y", np.array([[1.0, 0.0], [0.0, 1.0]]))
    small = {name: y * 0 for name, y in exact.items()}
    wanted = MetricEffect(ACCURACY, None).relative_to(small)(
        moved(small, "y", noisy["y"] - exact["y"])
    )
    assert MetricEffect(ACCURACY, None).relative_to(exact)(noisy) == pytest.approx(wanted)
    assert wanted > 0.1


def test_several_targets_belong_to_their_samples_too():
    """A run with a metric of several targets ended in an ``AttributeError``."""
    near = np.arange(12.0).reshape(6, 2)
    targets = {"near": near, "far": near + 1}

    def squares(outputs: Batch, target: dict[str, np.ndarray]) -> np.ndarray:
        scale = target["far"] - target["near"]
        return ((outputs["y"] - target["near"]) ** 2 * scale).sum(axis=1)

    both = Metric("both", squares, code=len)
    for first, rows in ((3, [3, 4]), (5, [5, 0])):  # samples beyond the last begin anew
        exact = {"y": near[rows]}
        effect_of = MetricEffect(both, targets).relative_to(exact, first=first)
        assert effect_of(moved(exact, "y", np.ones((2, 2)))) == pytest.approx(4.0)


def test_of_very_many_decisions_some_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    exact = {"y": RNG.standard_normal((4, 50, 10)).astype(np.float32)}
    noisy = moved(exact, "y", 0.1 * RNG.standard_normal((4, 50, 10)))
    whole = MetricEffect(ACCURACY, None).relative_to(exact)(noisy)
    monkeypatch.setattr(metric_effect, "_MOST_LOGITS", 500)
    assert MetricEffect(ACCURACY, None).relative_to(exact)(noisy) == pytest.approx(whole, rel=0.3)
