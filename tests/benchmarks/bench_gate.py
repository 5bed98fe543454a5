"""How often the gate fails equal models, and how often it finds a real loss, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from compressor.run.verdicts.statistics import Difference, Scale, find_steps, paired_difference

PAIRS = 2000
ALPHA = 0.05
ACCURACY = 0.9
PERCENT = Scale(100.0)
PERPLEXITY = Scale(1.0, exponential=True, higher_is_better=False)
Pair = tuple[np.ndarray, np.ndarray]


def answers(
    samples: int, disagreeing: float, drop: float, rng: np.random.Generator
) -> Iterator[Pair]:
    """Yield right and wrong answers of two models that differ on so large a share of samples."""
    lost, won = (disagreeing + drop) / 2, (disagreeing - drop) / 2
    for _ in range(PAIRS):
        drawn = rng.random(samples)
        base, candidate = drawn < ACCURACY, drawn < ACCURACY
        base[drawn < lost], candidate[drawn < lost] = True, False
        base[drawn > 1 - won], candidate[drawn > 1 - won] = False, True
        yield base.astype(float), candidate.astype(float)


def losses(samples: int, skewed: bool, rng: np.random.Generator) -> Iterator[Pair]:
    """Yield logarithmic losses of two equal models; each adds noise to what a sample is worth."""
    for _ in range(PAIRS):
        worth = rng.gamma(2.0, 1.0, samples)
        if skewed:  # few samples lose much, many win a little
            yield worth, worth + 0.1 * (rng.exponential(1.0, samples) - 1.0)
        else:
            yield worth + rng.normal(0, 0.1, samples), worth + rng.normal(0, 0.1, samples)


def shares(
    pairs: Iterator[Pair], scale: Scale, *tests: Callable[[Difference], bool]
) -> list[float]:
    """Return for each test in how many percent of the pairs it holds."""
    found = [paired_difference(*pair, scale) for pair in pairs]
    return [100 * sum(test(f) for f in found) / len(found) for test in tests]


def alarm(found: Difference) -> bool:
    """As the gate without a limit decides."""
    return found.drop > 0 and found.p < ALPHA


def exact_alarm(found: Difference) -> bool:
    return found.drop > 0 and found.p_exact is not None and found.p_exact < ALPHA


@pytest.mark.benchmark
def test_false_alarms_and_power(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)

    def covers(truth: float) -> Callable[[Difference], bool]:
        return lambda found: found.ci95[0] <= truth <= found.ci95[1]

    lines = [
        f"accuracy, {PAIRS} pairs each, fails at alpha {ALPHA}, in %",
        f"{'samples':>8}{'disagree':>9}{'drop':>6}{'mid-p':>8}{'exact':>8}{'interval holds':>16}",
    ]
    for samples, disagreeing, drop in [
        *((n, d, 0.0) for n in (500, 2000, 10000) for d in (0.01, 0.02, 0.04, 0.08)),
        *((2000, d, 0.01) for d in (0.02, 0.03, 0.04, 0.06, 0.08)),
    ]:
        tests = (alarm, exact_alarm, covers(100 * drop))
        row = shares(answers(samples, disagreeing, drop, rng), PERCENT, *tests)
        lines.append(
            f"{samples:8}{100 * disagreeing:9.0f}{100 * drop:6.0f}"
            f"{row[0]:8.1f}{row[1]:8.1f}{row[2]:16.1f}"
        )
    lines += ["", "perplexity, equal models, in %", f"{'samples':>8}{'noise':>12}{'fails':>8}"]
    for samples in (100, 400):
        for skewed in (False, True):
            (row_,) = shares(losses(samples, skewed, rng), PERPLEXITY, alarm)
            lines.append(f"{samples:8}{'skewed' if skewed else 'symmetric':>12}{row_:8.1f}")
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.mark.benchmark
def test_strict_gate(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    limit = 1.0
    lines = [
        f"{PAIRS} pairs each, limit {limit:g} point; how many are proved to be within it, in %",
        f"{'samples':>8}{'disagree':>9}{'drop is the limit':>19}{'no drop':>9}",
    ]
    for samples, disagreeing in ((500, 0.03), (2000, 0.02), (2000, 0.04), (2000, 0.08)):
        at, none = (
            shares(
                answers(samples, disagreeing, drop, rng),
                PERCENT,
                lambda found: found.within_p(limit) < ALPHA,
            )[0]
            for drop in (limit / 100, 0.0)
        )
        lines.append(f"{samples:8}{100 * disagreeing:9.0f}{at:19.1f}{none:9.1f}")
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.mark.benchmark
def test_steps_in_a_history(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    histories, samples, noise, drop = 300, 2000, 0.02, 0.01
    lines = [
        f"{histories} histories, {samples} samples, {100 * noise:.0f} % noise between runs, in %",
        f"{'runs':>6}{'false':>8}{'last found':>12}{'middle found':>14}{'off by one':>12}",
    ]

    def history(runs: int, at: int) -> list[int]:
        base = rng.random(samples) < ACCURACY
        lost = rng.random(samples) < drop / ACCURACY
        rows = []
        for run in range(runs):
            right = base & ~lost if run >= at else base
            rows.append(
                np.where(rng.random(samples) < noise, rng.random(samples) < ACCURACY, right)
            )
        return [step.index for step in find_steps(np.array(rows, float))]

    for runs in (2, 5, 10, 20, 50):
        none = [history(runs, runs) for _ in range(histories)]
        last = [history(runs, runs - 1) for _ in range(histories)]
        middle = [history(runs, runs // 2) for _ in range(histories)]
        near = {runs // 2 - 1, runs // 2, runs // 2 + 1}
        shown = (
            sum(bool(found) for found in none),
            sum(runs - 1 in found for found in last),
            sum(runs // 2 in found for found in middle),
            sum(bool(near & set(found)) for found in middle),
        )
        a, b, c, d = (100 * count / histories for count in shown)
        lines.append(f"{runs:6}{a:8.1f}{b:12.1f}{c:14.1f}{d:12.1f}")
    with capsys.disabled():
        print("", *lines, sep="\n")
