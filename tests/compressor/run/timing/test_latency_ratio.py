"""The ratio of two models' times: which bound is which, and what ends up in it."""

from dataclasses import replace

import numpy as np
import pytest

from compressor.run.timing.timing import Latencies, measure
from compressor.types.tensors import Batch

BATCH = {"x": np.zeros((4, 2))}


class Instant:
    runtime = "played"

    def run(self, batch: Batch) -> Batch:
        return batch


def played(**seconds: list[float]) -> Latencies:
    """Measure, and give each model one time an opening in place of what the clock said."""
    measured = measure(dict.fromkeys(seconds, Instant), [BATCH], budget=0.0)
    return replace(
        measured,
        seconds={
            name: [np.full_like(measured.seconds[name][0], time) for time in times]
            for name, times in seconds.items()
        },
    )


def test_the_lower_bound_comes_first() -> None:
    times = played(base=[2.0] * 7, other=[4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    ratio = times.ratio("other", "base")
    # Seven openings: the chance that all lie on one side is 2 / 128, below three percent.
    assert ratio["ci95"] == pytest.approx([2.0, 5.0])
    assert ratio["value"] == pytest.approx(3.5)
    turned = times.ratio("base", "other")
    assert turned["ci95"] == pytest.approx([1 / 5.0, 1 / 2.0])
    assert turned["value"] == pytest.approx(1 / 3.5)


def test_times_pair_by_opening() -> None:
    times = played(base=[1.0, 2.0, 4.0] * 4, other=[2.0, 4.0, 8.0] * 4)
    assert times.ratio("other", "base")["ci95"] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(("spread", "precise"), [(0.049, True), (0.051, False)])
def test_half_the_width_of_the_interval_is_the_precision(spread: float, precise: bool) -> None:
    others = [1.0 - spread, *[1.0] * 5, 1.0 + spread]
    assert played(base=[1.0] * 7, other=others).precise(0.05) == precise
    assert played(base=[1.0] * 7, same=[1.0] * 7, other=others).precise(0.05) == precise


def test_what_never_differs_is_known_exactly() -> None:
    assert played(base=[1.0] * 7, other=[2.0] * 7).precise(0.0)


def test_a_model_alone_is_precise_by_its_own_time() -> None:
    times = [0.94, *[1.0] * 5, 1.06]
    assert not played(only=times).precise(0.05)
    assert played(only=times).precise(0.07)
