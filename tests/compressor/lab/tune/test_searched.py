"""What the search data say of a candidate, above all of figures such as the F1 of a rare class."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

from compressor.errors import DataError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.search_data import SearchData, search_data
from compressor.lab.tune.searched import Searched, breaks, judged
from compressor.lab.tune.uniform import Uniform
from compressor.lab.tune.workbench import Workbench
from compressor.progress import Silent
from compressor.run.evaluate import Evaluation
from compressor.run.metrics.class_metrics import ACCURACY, AGREEMENT, PERPLEXITY
from compressor.run.metrics.metrics import COSINE, Metric
from compressor.run.metrics.text_metrics import CHARACTER_ERROR_RATE, F1, SPEARMAN
from compressor.run.verdicts.statistics import paired_difference
from tests.compressor.tiny_project import Project, sample_images

SAMPLES = 4000
AT = np.arange(9) % 2


def evaluation(metric: Metric, outputs: Any, target: Any) -> Evaluation:
    values = metric.settled(metric.per_sample(outputs, target, len(next(iter(outputs.values())))))
    return Evaluation(metric.summary(values), values, 30.0, None, 0.0)


def searching(metric: Metric, *, same: bool = False, tells: bool = True) -> SearchData:
    return SearchData((), metric, same, tells, AGREEMENT, {}, "")


def scores(decisions: np.ndarray) -> dict[str, np.ndarray]:
    return {"logits": np.eye(2)[decisions.astype(int)]}


@pytest.fixture
def decisions() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return labels, of which one in twenty is 1, and what two models decide."""
    rng = np.random.default_rng(0)
    labels = rng.random(SAMPLES) < 0.05
    base = np.where(rng.random(SAMPLES) < np.where(labels, 0.75, 0.99), labels, ~labels)
    changed = rng.random(SAMPLES) < np.where(base | labels, 0.06, 0.002)
    return labels, base, base ^ changed


def without_labels(metric: Metric, base: np.ndarray, ours: np.ndarray, float_model: Evaluation):
    theirs = evaluation(metric, scores(base), scores(base))
    pair = theirs, evaluation(metric, scores(ours), scores(base))
    return judged([pair], searching(metric), float_model, stopped=False)


def test_without_labels_a_figure_may_lose_as_much_as_its_own_interval_says(
    decisions: tuple[np.ndarray, np.ndarray, np.ndarray],
):
    labels, base, ours = decisions
    float_model = evaluation(F1, scores(base), labels.astype(int))
    proof = paired_difference(
        float_model.per_sample,
        evaluation(F1, scores(ours), labels.astype(int)).per_sample,
        F1.scale,
    )
    half = (proof.ci95[1] - proof.ci95[0]) / 2
    found = without_labels(F1, base, ours, float_model)
    assert found.drop is None
    assert found.bound == pytest.approx(half, rel=0.2)
    of_accuracy = without_labels(
        AGREEMENT, base, ours, evaluation(ACCURACY, scores(base), labels.astype(int))
    )
    assert of_accuracy.bound is not None
    changed = (base != ours).sum() + 0.5
    assert of_accuracy.bound == pytest.approx(
        196 * math.sqrt(changed / (SAMPLES + 1) / SAMPLES), rel=1e-3
    )
    assert found.bound > 5 * of_accuracy.bound


def test_what_changes_nothing_may_still_lose(
    decisions: tuple[np.ndarray, np.ndarray, np.ndarray],
):
    labels, base, _ = decisions
    float_model = evaluation(F1, scores(base), labels.astype(int))
    proof = paired_difference(float_model.per_sample, float_model.per_sample, F1.scale)
    found = without_labels(F1, base, base, float_model)
    assert found.bound == pytest.approx(proof.ci95[1], rel=0.4)


def test_a_figure_ends_no_search_early(decisions: tuple[np.ndarray, np.ndarray, np.ndarray]):
    labels, base, _ = decisions
    pairs = [
        tuple(evaluation(m, scores(d), labels.astype(int)) for d in (base, ~base))
        for m in (F1, ACCURACY)
    ]
    first, second = pairs
    assert not breaks([(first[0], first[1])], searching(F1, same=True), 1.0)
    assert breaks([(second[0], second[1])], searching(ACCURACY, same=True), 1.0)
    unbounded = replace(ACCURACY, bounds=(-math.inf, math.inf))
    assert not breaks([(second[0], second[1])], searching(unbounded, same=True), 1.0)


@pytest.mark.parametrize(
    ("lost", "limit", "broken"),
    [
        (0.3, 10.0, True),
        (0.3, 0.0, True),
        (0.3, 40.0, False),
        (0.3, 150.0, False),
        (-0.3, 10.0, False),
        (-0.3, 0.0, False),
        (0.3, -1.0, False),
        (0.3, None, False),
    ],
)
@pytest.mark.parametrize("higher", [True, False])
def test_a_limit_is_broken_by_losses_above_it(
    lost: float, limit: float | None, broken: bool, higher: bool
):
    """In points; whichever way is worse. A limit that asks for a gain ends no search early."""
    metric = replace(ACCURACY, higher_is_better=higher)
    base = np.full(400, 0.5)
    pair = [
        Evaluation(metric.summary(x), x, 30.0, None, 0.0)
        for x in (base, base - lost if higher else base + lost)
    ]
    parts = [(pair[0], pair[1])]
    assert breaks(parts, searching(metric, same=True), limit) is broken
    assert not breaks(parts, searching(metric), limit)


def right(samples: int, wrong: int, sqnr_db: float | None) -> Evaluation:
    values = np.ones(samples)
    values[:wrong] = 0.0
    return Evaluation(ACCURACY.summary(values), values, sqnr_db, None, 0.0)


def test_with_labels_the_bound_is_where_the_interval_of_the_proof_will_end():
    """8 of 400 lost in two parts: 2 points, and 14 of deviation over as many as will judge."""
    pairs = [(right(100, 0, None), right(100, 5, 20.0)), (right(300, 0, None), right(300, 3, None))]
    found = judged(pairs, searching(ACCURACY, same=True), right(1600, 0, None), stopped=True)
    assert (found.samples, found.drop, found.stopped) == (400, pytest.approx(2.0), True)
    assert found.bound == pytest.approx(2.0 + 1.96 * 14.0 / 40.0)
    assert found.sqnr_db == pytest.approx(-10 * math.log10(0.01 / 4))  # of the errors' mean power


@pytest.mark.parametrize("sqnr_db", [None, 100.0])
@pytest.mark.parametrize(
    ("same", "tells", "drop", "bound"),
    [(True, True, 2.0, 2.0), (False, True, None, 0.0), (False, False, None, 0.0)],
)
def test_the_same_function_leaves_nothing_to_chance(
    sqnr_db: float | None, same: bool, tells: bool, drop: float | None, bound: float
):
    pairs = [(right(400, 0, None), right(400, 8, sqnr_db))]
    search = searching(ACCURACY, same=same, tells=tells)
    found = judged(pairs, search, right(1600, 0, None), stopped=False)
    assert (found.drop, found.bound) == (pytest.approx(drop), pytest.approx(bound))
    assert found.sqnr_db == pytest.approx(sqnr_db)


@pytest.mark.parametrize(
    ("metric", "lowest", "bound"),
    [
        # Of 401, half a sample: two of 1600, whose number has a standard error of 1.41.
        (AGREEMENT, 1.0, 0.1730),
        (AGREEMENT, 0.5, 0.1730),
        # As far as two samples lie apart, but no less than a decision.
        (AGREEMENT, -2.0, 0.5190),
        # A figure that counts decisions may lose by those that no sample shows: four more.
        (F1, 1.0, 0.2999),
    ],
)
def test_none_is_not_never(metric: Metric, lowest: float, bound: float):
    pairs = [(right(400, 0, None), right(400, 0, 30.0))]
    float_model = right(1600, 0, None)
    float_model.per_sample[0] = lowest
    found = judged(pairs, searching(metric), float_model, stopped=False)
    assert (found.samples, found.drop) == (400, None)
    assert found.bound == pytest.approx(bound, abs=1e-4)


def test_what_does_not_tell_leaves_the_bound_open():
    pairs = [(right(400, 0, None), right(400, 8, 99.0))]
    found = judged(pairs, searching(COSINE, tells=False), right(1600, 0, None), stopped=False)
    assert (found.drop, found.bound) == (None, None)


@pytest.mark.parametrize(
    ("metric", "judge", "tells", "parts"),
    [
        (ACCURACY, AGREEMENT, True, 2),
        (F1, F1, True, 1),
        (CHARACTER_ERROR_RATE, CHARACTER_ERROR_RATE, True, 1),
        (SPEARMAN, COSINE, False, 2),
        (PERPLEXITY, AGREEMENT, False, 2),
        (replace(F1, needs_labels=True), AGREEMENT, False, 2),
    ],
)
def test_without_labels_shares_are_compared_with_the_float_model(
    on_onnx: Project, metric: Metric, judge: Metric, tells: bool, parts: int
):
    np.savez(on_onnx.folder / "calib.npz", image=sample_images(2, 512))
    on_onnx.spec["data"]["calibration"]["samples"] = 64
    found = search_data(replace(on_onnx.plan(), metric=metric))
    assert (found.metric.name, found.same, found.tells) == (judge.name, False, tells)
    assert found.metric.against_float
    assert len(found.parts) == parts


def test_samples_without_the_class_leave_its_figure_open(monkeypatch: pytest.MonkeyPatch):
    undefined: Any = None
    bench = Workbench(undefined, undefined, searching(F1), undefined, Silent(), 1.0)
    base, other = (evaluation(AGREEMENT, scores(d), scores(np.ones(9))) for d in (np.ones(9), AT))

    def looked_at(bench: Workbench, _: Candidate) -> Searched:
        if bench.search.metric is F1:
            raise DataError("metric 'f1'", "no sample has anything to count", "give others")
        return judged([(base, other)], bench.search, base, stopped=False)

    monkeypatch.setattr(Workbench, "_looked_at", looked_at)
    candidate = Candidate("8 bits", *[undefined] * 7, float_bytes=1)
    assert bench.searched(candidate) == Searched(9, None, None, 30.0)
    assert bench.search.metric is AGREEMENT


def test_a_candidate_without_a_metric_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """It ended the search; what stayed in the list would have been searched again for the page."""
    candidate, bench = Mock(searched=None), Workbench(*[MagicMock()] * 5, 1.0)
    problem = DataError("metric 'm'", "returned NaN or infinity", "return finite numbers")
    bench.search.metric.figure = None
    bench.made = {"key": candidate}
    monkeypatch.setattr(Workbench, "_looked_at", Mock(side_effect=problem))
    monkeypatch.setattr(Workbench, "candidate", lambda *_: candidate)
    journal = Mock(tell=bench.searched)
    assert Uniform(bench, Goal(1.0), journal, Mock())._made("8 bits", Mock(), {}) == []
    assert journal.skip.call_args.args == ("8 bits", "metric 'm': returned NaN or infinity")
    assert not bench.made
