"""Where a series of models became worse."""

import numpy as np

from compressor.run.statistics import find_steps


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
