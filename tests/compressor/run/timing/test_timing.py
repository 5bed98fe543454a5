"""Interleaved timing; clocks are played, so that nothing depends on the machine."""

from itertools import pairwise

import numpy as np
import pytest

from compressor.run.timing import timing
from compressor.run.timing.timing import Opener, already_open, measure, measure_sizes
from compressor.types.tensors import Batch
from tests.compressor.run.played_clock import BATCH, Clock, Seconds, Timed, steady


def test_percentiles_and_ratio(clock: Clock):
    times = measure(steady(clock, a=0.002, b=0.004), [BATCH])
    summary = times.summary("a")
    milliseconds = {key: summary.pop(key) for key in ("p50", "p90", "p99", "mean")}
    assert milliseconds == pytest.approx(dict.fromkeys(milliseconds, 2))
    assert summary.pop("ci95") == pytest.approx([2, 2])
    assert summary.pop("rounds") >= 7 * 2 * 3
    assert summary.pop("load") >= 0
    same = {key: summary.pop(key) for key in ("best", "cpu_ms")}
    assert same == pytest.approx({"best": 2, "cpu_ms": 2})
    none = {key: summary.pop(key) for key in ("drift", "waiting")}
    assert none == pytest.approx({"drift": 0, "waiting": 0}, abs=1e-9)
    assert summary == {"batch": 4, "inputs": 1, "openings": 7}
    ratio = times.ratio("b", "a")
    assert ratio["value"] == pytest.approx(2)
    assert ratio["ci95"] == pytest.approx([2, 2])
    assert ratio["clock"] == "cpu"


def test_models_that_never_differ_are_opened_seven_times_as_slow_ones_are(clock: Clock):
    assert measure(steady(clock, a=1e-3, b=1e-3), [BATCH]).summary("a")["openings"] == 7
    slow = measure(steady(clock, a=1.0, b=1.0), [BATCH], budget=2.0).summary("a")
    assert (slow["openings"], slow["rounds"]) == (7, 7)


@pytest.mark.usefixtures("in_earnest")
def test_models_close_before_any_is_opened_again_and_take_turns_in_the_order():
    log = []

    class Counted:
        runtime = "counted"

        def __init__(self, name: str):
            log.append(f"open {name}")
            self.name = name

        def __del__(self) -> None:
            log.append(f"close {self.name}")

        def run(self, batch: Batch) -> Batch:
            return batch

    measure({n: lambda n=n: Counted(n) for n in "ab"}, [BATCH], budget=0.0)
    openings = ["".join(entry.split()[1] for entry in log[i : i + 2]) for i in range(0, 28, 4)]
    assert all(entry.startswith("open") for i in range(0, 28, 4) for entry in log[i : i + 2])
    assert all(entry.startswith("close") for i in range(2, 28, 4) for entry in log[i : i + 2])
    assert len(log) == 28
    assert sorted(openings)[2:5] in (["ab", "ab", "ba"], ["ab", "ba", "ba"])


def test_warm_up_ends_when_times_settle_and_does_not_count(clock: Clock):
    runs = {"a": 0, "b": 0}

    def cold_at_first(name: str) -> Seconds:
        def seconds(_: Batch) -> float:
            runs[name] += 1
            return 0.001 * max(1.0, 16.0 / runs[name])

        return seconds

    runners = {n: Timed(clock, cold_at_first(n)) for n in "ab"}
    times = measure(already_open(runners), [BATCH])
    assert times.summary("a")["p99"] == pytest.approx(1)
    assert times.seconds["a"][0].max() < 0.0012


def test_over_several_inputs_the_time_is_that_of_all_and_the_ratio_paired(clock: Clock):
    inputs = [{"x": np.full((1, 2), i)} for i in range(4)]
    base = Timed(clock, lambda _: 0.004)
    exits = Timed(clock, lambda batch: 0.010 if batch["x"].flat[0] == 3 else 0.002)
    times = measure(already_open({"base": base, "exits": exits}), inputs)
    assert times.inputs == 4
    summary = times.summary("exits")
    assert summary["p50"] == pytest.approx(2)
    assert summary["mean"] == pytest.approx(4)
    assert summary["ci95"] == pytest.approx([4, 4])
    assert times.ratio("exits", "base")["value"] == pytest.approx(1)


def test_inputs_are_as_many_as_the_budget_lets_be_timed(clock: Clock):
    inputs = [{"x": np.full((1, 2), i)} for i in range(64)]
    models = steady(clock, a=0.01, b=0.01)
    # Seven openings, two blocks of a run and a warm-up of 20 ms are 0.42 s for each input.
    assert measure(models, inputs, budget=4.0).inputs == 4
    assert measure(models, inputs, budget=0.0).inputs == 1


def sized(clock: Clock, log: list[int], each: float) -> Opener:
    """Return the opener of a model that notes the sizes it is run on, and 0 when it is opened."""

    def seconds(batch: Batch) -> float:
        log.append(len(batch["x"]))
        return each * log[-1]

    def opened() -> Timed:
        log.append(0)
        return Timed(clock, seconds)

    return opened


SIZES = [[{"x": np.zeros((size, 2))}] for size in (1, 16)]


def test_sizes_share_the_openings(clock: Clock):
    log: list[int] = []
    small, large = measure_sizes({"a": sized(clock, log, 0.001)}, SIZES)
    assert (small.batch, large.batch) == (1, 16)
    assert small.clock == large.clock == "cpu"
    assert log.count(0) == 7
    assert [times.summary("a")["openings"] for times in (small, large)] == [7, 7]
    assert [times.summary("a")["p50"] for times in (small, large)] == pytest.approx([1, 16])


def test_a_model_may_be_timed_on_the_smallest_batch_alone(clock: Clock):
    logs: dict[str, list[int]] = {"a": [], "b": []}
    models = {name: sized(clock, log, 0.001) for name, log in logs.items()}
    small, large = measure_sizes(models, SIZES, smallest_only=["b"])
    assert (set(small.seconds), set(large.seconds)) == ({"a", "b"}, {"a"})
    assert (16 in logs["a"], 16 in logs["b"]) == (True, False)
    assert len(small.seconds["b"]) == len(large.seconds["a"]) == 7


@pytest.mark.parametrize(
    ("each", "sizes"),
    # Seven openings with a warm-up and two runs of 16 samples: 2.9, 3.2 and 672 seconds.
    [(0.0085, [1, 16]), (0.0095, [1, 8]), (2.0, [1])],
)
def test_large_batches_are_halved_where_the_budget_is_short(
    clock: Clock, each: float, sizes: list[int]
):
    log: list[int] = []
    measured = measure_sizes({"a": sized(clock, log, each)}, SIZES)
    assert [times.batch for times in measured] == sizes
    assert measured[-1].summary("a")["p50"] == pytest.approx(1000 * each * sizes[-1])
    assert max(log) == (1 if each > 1 else 16), "a run of all samples would take half a minute"


def test_a_batch_is_asked_for_that_fits_if_samples_take_a_quarter_of_the_time_in_it(clock: Clock):
    """64 of them would then take 12.3 seconds, and 16 take 3.1; so 8 are run, and no more."""
    log: list[int] = []

    def seconds(batch: Batch) -> float:
        log.append(len(batch["x"]))
        return 0.073 * (1 if log[-1] == 2 else log[-1] / 2 / 4)

    sizes = [[{"x": np.zeros((size, 2))}] for size in (2, 64)]
    measured = measure_sizes(already_open({"a": Timed(clock, seconds)}), sizes)
    assert [times.batch for times in measured] == [2, 8]
    assert set(log) == {2, 8}


def test_a_batch_that_would_be_as_small_as_the_one_before_is_left_out(clock: Clock):
    """16 samples would take 8.4 seconds, a quarter of them 2.1."""
    log: list[int] = []
    sizes = [[{"x": np.zeros((size, 2))}] for size in (4, 16)]
    measured = measure_sizes({"a": sized(clock, log, 0.025)}, sizes)
    assert [times.batch for times in measured] == [4]


def test_a_slow_model_is_warmed_up_by_one_run(clock: Clock):
    log: list[int] = []
    measure({"a": sized(clock, log, 0.1)}, [BATCH], budget=0.0)
    assert log == 7 * [0, 4, 4]


def test_what_other_threads_compute_is_timed_by_the_wall(clock: Clock):
    class Divided(Timed):
        def run(self, batch: Batch) -> Batch:
            self.clock.elsewhere += self.seconds(batch)
            return super().run(batch)

    models = already_open({n: Divided(clock, lambda _: 0.001) for n in "ab"})
    times = measure(models, [BATCH])
    assert times.ratio("b", "a")["clock"] == "wall"
    assert times.summary("a")["cpu_ms"] is None
    assert times.summary("a")["waiting"] is None


def test_what_computes_off_the_processor_is_timed_by_the_wall(clock: Clock):
    class Device(Timed):
        def run(self, batch: Batch) -> Batch:
            self.clock.away += self.seconds(batch)
            self.clock.now += 1e-5
            return batch

    models = already_open(
        {"a": Device(clock, lambda _: 0.001), "b": Device(clock, lambda _: 0.003)}
    )
    ratio = measure(models, [BATCH], clock="wall").ratio("b", "a")
    assert ratio["value"] == pytest.approx(3, rel=0.05)
    assert ratio["clock"] == "wall"


class Counting(Timed):
    """Counts runs in ``log``, by the name and the first number of the batch."""

    def __init__(self, clock: Clock, seconds: float, name: str, log: list[tuple[str, int]]):
        super().__init__(clock, lambda _: seconds)
        self.name, self.log = name, log

    def run(self, batch: Batch) -> Batch:
        self.log.append((self.name, int(batch["x"].flat[0])))
        return super().run(batch)


@pytest.mark.parametrize(
    ("seconds", "inputs", "budget", "cycles", "runs"),
    [
        # 5 ms hold 4.5 runs of the faster model; a cycle is 15.5 ms, and an opening has 31.25.
        ((0.0011, 0.002), 1, 5.0, 3, 5),
        ((0.0011, 0.002), 1, 2.0, 2, 5),  # it has 12.5, but two cycles at least
        ((0.002, 0.0011), 2, 5.0, 2, 3),  # both inputs together are 2.3 times in 5 ms
        ((0.006, 0.007), 1, 20.0, 10, 1),  # 13 ms of 125
        ((1e-7, 1e-7), 1, 0.01, 2, 200),
    ],
)
def test_how_much_an_opening_times(
    clock: Clock, seconds: tuple[float, float], inputs: int, budget: float, cycles: int, runs: int
):
    log: list[tuple[str, int]] = []
    models = {n: Counting(clock, s, n, log) for n, s in zip("ab", seconds, strict=True)}
    batches = [{"x": np.full((1, 2), i)} for i in range(inputs)]
    times = measure(already_open(models), batches, budget)
    assert {o.shape for o in times.seconds["a"]} == {(2, cycles, inputs, runs)}
    # Warming up takes two windows of three runs, and one run of each further input.
    first = log[: 12 + 2 * (inputs - 1)]
    assert first == [*[("a", 0)] * 6, *[("b", 0)] * 6, *[("a", 1), ("b", 1)] * (inputs - 1)]
    blocks = log[len(first) : len(first) + 2 * cycles * inputs * runs]
    names = [name for name, _ in blocks[:: inputs * runs]]  # a model's inputs are one block
    assert [place for _, place in blocks[::runs]] == [*range(inputs)] * 2 * cycles
    # Orders come with their reverse.
    pairs = [names[i : i + 2] for i in range(0, len(names), 2)]
    assert all(a == b[::-1] for a, b in zip(pairs[::2], pairs[1::2], strict=False))


@pytest.mark.parametrize(
    ("seconds", "budget", "cycles"),
    [(0.049, 5.0, 2), (0.051, 5.0, 1), (0.051, 40.0, 3)],  # a cycle is two runs; 0.1 s are enough
)
def test_a_long_cycle_is_enough_for_an_opening(
    clock: Clock, seconds: float, budget: float, cycles: int
):
    times = measure(steady(clock, a=seconds, b=seconds), [BATCH], budget)
    assert {o.shape[1] for o in times.seconds["b"]} == {cycles}


def test_a_slower_model_has_shorter_blocks(clock: Clock):
    """5 ms hold 4.5 runs of the fastest; what takes up to four times as long has as many."""
    models = steady(clock, a=0.0011, b=0.0044, c=0.0088, d=0.03)
    times = measure(models, [BATCH])
    assert {n: o[0].shape[-1] for n, o in times.seconds.items()} == {"a": 5, "b": 5, "c": 3, "d": 1}
    assert times.ratio("c", "a")["value"] == pytest.approx(8)


def test_larger_batches_are_warmed_up_by_two_runs_once_the_smallest_has_settled(clock: Clock):
    log: list[int] = []
    models = {"a": sized(clock, log, 0.001)}
    first, second = measure_sizes(models, SIZES, precision=1.0)
    runs = first.seconds["a"][0].shape[-1], second.seconds["a"][0].shape[-1]
    assert (first.batch, second.batch, *runs) == (1, 16, 6, 1)
    starts = [i for i, batch in enumerate(log) if not batch]
    assert log[: starts[1]].count(16) == 6, "two runs find out what fits"
    for start, end in pairwise(starts[1:]):
        opened = log[start + 1 : end]
        warm = opened.count(16) - 2  # and two cycles
        assert (opened[:6], warm) == ([1] * 6, 2)


def test_an_opening_ends_where_others_have_the_processor(clock: Clock):
    """A cycle takes 13 ms of the processor's 125, and 0.3 s of 2."""

    def seconds(_: Batch) -> float:
        clock.away += 0.1435
        return 0.0065

    models = already_open({n: Timed(clock, seconds) for n in "ab"})
    assert measure(models, [BATCH], 20.0).seconds["a"][0].shape[1] == 7


@pytest.mark.parametrize(("falls", "windows"), [(0.94, 6), (0.96, 2), (0.0, 2), (None, 1)], ids=str)
def test_a_model_is_warm_when_windows_take_as_long(clock: Clock, falls: float | None, windows: int):
    """Windows of three runs; one that falls by 6 % is another time, one by 4 % is the same."""
    runs = []

    def seconds(_: Batch) -> float:
        runs.append(None)
        if falls is None:
            return 0.02  # time is up after 50 ms
        window = (len(runs) - 1) // 3
        return 0.001 * falls ** min(window, 4) if falls else 0.001

    models = already_open({"a": Timed(clock, seconds)})
    times = measure(models, [BATCH], 0.0)
    timed = times.seconds["a"][0][0].size
    again = sum(o[0].size for o in times.seconds["a"][1:]) + 6 * 3 * (1 if falls is None else 2)
    assert len(runs) - timed - again == 3 * windows


@pytest.mark.parametrize(("elsewhere", "kept"), [(0.24, "cpu"), (0.26, "wall")])
def test_a_fifth_of_the_time_may_be_of_other_threads(clock: Clock, elsewhere: float, kept: str):
    class Divided(Timed):
        def run(self, batch: Batch) -> Batch:
            self.clock.elsewhere += elsewhere * self.seconds(batch)
            return super().run(batch)

    models = already_open({n: Divided(clock, lambda _: 0.001) for n in "ab"})
    assert measure(models, [BATCH]).clock == kept


def test_what_takes_no_time_on_the_processor_is_timed_by_the_wall(clock: Clock):
    class Device(Timed):
        def run(self, batch: Batch) -> Batch:
            self.clock.away += self.seconds(batch)
            return batch

    models = already_open({n: Device(clock, lambda _: 0.004) for n in "ab"})
    assert measure(models, [BATCH], budget=1.0).clock == "wall"


def test_the_load_is_that_of_the_last_minute(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (7.0, 8.0, 9.0))
    assert measure(steady(clock, a=0.001), [BATCH]).load == 7


def test_measuring_goes_on_until_it_is_precise_or_the_time_is_up(clock: Clock):
    rng = np.random.default_rng(0)

    def noisy(_: Batch) -> float:
        return 0.001 * float(np.exp(0.3 * rng.standard_normal()))

    def openings(budget: float | None, precision: float) -> int:
        models = already_open({n: Timed(clock, noisy) for n in "ab"})
        return measure(models, [BATCH], budget, precision).summary("a")["openings"]

    assert openings(100.0, 1.0) == 7
    assert openings(100.0, 1e-9) == 40
    start = clock.now
    assert 7 < openings(1.0, 1e-9) < 40
    assert 1.0 < clock.now - start < 1.1
    start = clock.now
    openings(None, 1e-9)
    assert 2.0 < clock.now - start < 5.1


def test_to_open_models_counts_as_time_that_is_spent(clock: Clock):
    rng = np.random.default_rng(0)
    noisy = Timed(clock, lambda _: 0.001 * float(np.exp(0.3 * rng.standard_normal())))

    def opened() -> Timed:
        clock.now += 1.0
        return noisy

    assert measure({"a": opened}, [BATCH], 5.0, 1e-9).summary("a")["openings"] == 7
    assert measure({"a": opened}, [BATCH], 12.0, 1e-9).summary("a")["openings"] in (11, 12)


@pytest.mark.parametrize(("used", "windows"), [("cpu", 2), ("wall", 4)])
def test_a_model_is_warm_by_the_clock_that_counts(clock: Clock, used: str, windows: int):
    """Its time on the processor is steady; in all, a run takes half as long in each window."""
    runs = 0

    def seconds(_: Batch) -> float:
        nonlocal runs
        clock.away += 0.004 * 0.5 ** min(runs // 3, 2)
        runs += 1
        return 0.0001

    models = already_open({"a": Timed(clock, seconds)})
    times = measure(models, [BATCH], 0.0, clock=used)  # type: ignore[arg-type]  # one of two
    openings = times.seconds["a"]
    timed = sum(opening[0].size for opening in openings)
    assert runs - timed == 3 * (windows + 2 * (len(openings) - 1))
