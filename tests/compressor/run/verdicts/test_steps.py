"""Where a series of models became worse."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from compressor.run.verdicts.statistics import Step, find_steps


def series(levels: list[float], samples: int = 2000, noise: float = 0.02) -> np.ndarray:
    """Return models that get so many percent of the samples right, the same ones but for noise."""
    rng = np.random.default_rng(0)
    order = rng.permutation(samples)
    rows = []
    for level in levels:
        right = order < level * samples / 100
        rows.append(right ^ (rng.random(samples) < noise))
    return np.array(rows, np.float64)


def test_a_level_has_no_step() -> None:
    assert not find_steps(series([90.0] * 12))
    assert not find_steps(np.ones((12, 300)))


def test_one_model_or_none_has_no_step() -> None:
    assert not find_steps(np.ones((1, 30)))


def test_a_step_in_the_middle_is_named() -> None:
    (step,) = find_steps(series([90.0] * 8 + [87.0] * 7))
    assert (step.index, step.start, step.end) == (8, 0, 15)
    assert step.p < 0.001


def test_the_latest_model_alone_is_enough() -> None:
    (step,) = find_steps(series([90.0] * 8 + [87.0], noise=0.005))
    assert step.index == 8


def test_down_and_up_again() -> None:
    steps = find_steps(series([90.0] * 6 + [80.0] * 6 + [92.0] * 6))
    assert [(s.index, s.start, s.end) for s in steps] == [(6, 0, 12), (12, 6, 18)]


def test_the_order_of_samples_does_not_matter() -> None:
    rows = series([90.0] * 5 + [86.0] * 5)
    shuffled = rows[:, np.random.default_rng(1).permutation(rows.shape[1])]
    assert [s.index for s in find_steps(rows)] == [s.index for s in find_steps(shuffled)]


def test_false_steps_are_rare() -> None:
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(100):
        base = rng.random(500) < 0.9
        rows = [base ^ (rng.random(500) < 0.05) for _ in range(8)]
        found += bool(find_steps(np.array(rows, np.float64)))
    assert found <= 10


def by_hand(rows: np.ndarray, first: int, end: int, alpha: float) -> list[tuple[int, float]]:
    """Find steps and their chances, each cut looked at on its own."""
    count = end - first
    cuts = {}
    for cut in range(first + 1, end):
        before, after = rows[first:cut].mean(), rows[cut:end].mean()
        cuts[cut] = abs(before - after) * math.sqrt((cut - first) * (end - cut) / count)
    if not cuts:
        return []
    index = max(cuts, key=lambda cut: cuts[cut])
    losses = rows[first:index].mean(axis=0) - rows[index:end].mean(axis=0)
    score = abs(losses.sum()) / math.sqrt((losses**2).sum()) if losses.any() else 0.0
    p = min(1.0, 2 * NormalDist().cdf(-score) * (count - 1))
    if p >= alpha:
        return []
    left, right = by_hand(rows, first, index, alpha), by_hand(rows, index, end, alpha)
    return [*left, (index, p), *right]


@pytest.mark.parametrize("alpha", [0.05, 0.9])
@pytest.mark.parametrize("seed", range(12))
def test_steps_and_chances_are_those_of_looking_at_each_cut(seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.uniform(0.5, 0.9, 4), rng.integers(1, 5, 4))
    rows = (rng.random((len(levels), 60)) < levels[:, None]).astype(np.float64)
    found = find_steps(rows, alpha)
    expected = by_hand(rows, 0, len(rows), alpha)
    assert [s.index for s in found] == [index for index, _ in expected]
    assert [s.p for s in found] == pytest.approx([p for _, p in expected])
    edges = [0, *(s.index for s in found), len(rows)]
    assert all(s.start <= edges[i] and s.end >= edges[i + 2] for i, s in enumerate(found))


def test_two_models_may_have_a_step_and_three_two() -> None:
    rows = np.repeat([[0.9], [0.5], [0.1]], 40, axis=1)
    assert [(s.index, s.start, s.end) for s in find_steps(rows[:2])] == [(1, 0, 2)]
    assert [(s.index, s.start, s.end) for s in find_steps(rows)] == [(1, 0, 2), (2, 1, 3)]


def test_small_steps_of_every_sample_are_steps() -> None:
    (step,) = find_steps(np.repeat([[0.5], [0.4]], 40, axis=1))
    assert step.p == pytest.approx(2 * NormalDist().cdf(-math.sqrt(40)))


def test_alpha_is_the_chance_from_which_on_there_is_no_step() -> None:
    rows = np.array([[1.0] * 60, [0.0] * 3 + [1.0] * 57])
    (step,) = find_steps(rows, 0.5)
    assert step.p == pytest.approx(2 * NormalDist().cdf(-math.sqrt(3)))
    assert not find_steps(rows, step.p)
    assert find_steps(rows, math.nextafter(step.p, 1)) == [Step(1, 0, 2, step.p)]


def test_models_that_are_the_same_have_no_step_at_any_level() -> None:
    assert not find_steps(np.ones((2, 60)), 1.0)
    assert not find_steps(np.ones((9, 60)), 1.0)
