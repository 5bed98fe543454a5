"""What the times of interleaved blocks say: summaries, ratios, and their precision."""

import numpy as np
import pytest

from compressor.run.timing.timing import Latencies, median_interval


def test_the_interval_is_the_same_each_time():
    rng = np.random.default_rng(0)
    times = Latencies(1, {n: [rng.random((2, 20, 1, 1)) + 1 for _ in range(9)] for n in "ab"})
    assert times.ratio("a", "b") == times.ratio("a", "b")
    low, high = times.ratio("a", "b")["ci95"]
    assert low <= times.ratio("a", "b")["value"] <= high
    assert low < high


def test_precision_counts_for_every_model_and_for_one_alone():
    rng = np.random.default_rng(0)
    exact = [np.full((2, 3, 1, 1), 0.01)] * 8
    noisy = [0.01 * np.exp(0.1 * rng.standard_normal((2, 3, 1, 1))) for _ in range(8)]
    assert Latencies(1, {"a": exact, "b": exact}).precise(0.01)
    assert not Latencies(1, {"a": exact, "b": exact, "c": noisy}).precise(0.01)
    assert Latencies(1, {"a": exact}).precise(0.01)
    assert not Latencies(1, {"a": noisy}).precise(0.01)


def test_a_summary_is_of_all_runs_and_blocks():
    rng = np.random.default_rng(0)
    times = [rng.uniform(1, 2, (2, cycles, 3, 4)) * [[[[0.5]]], [[[1]]]] for cycles in (3, 4)]
    summary = Latencies(8, {"a": times}, "cpu", 1.5).summary("a")
    wall = [opening[1].transpose(0, 2, 1).reshape(-1, 3) for opening in times]  # [runs, inputs]
    runs = np.concatenate(wall) * 1e3
    assert [summary[key] for key in ("p50", "p90", "p99")] == pytest.approx(
        np.percentile(runs, [50, 90, 99])
    )
    assert summary["mean"] == pytest.approx(np.mean([np.median(runs[:, i]) for i in range(3)]))
    ends = median_interval([opening.mean(1) * 1e3 for opening in wall], 0.97)
    assert summary["ci95"] == pytest.approx([min(ends[0], summary["mean"]), ends[1]])
    blocks = [[o[1, c].mean() for c in range(o.shape[1])] for o in times]
    assert summary["best"] == pytest.approx(1e3 * min(map(min, blocks)))
    cpu = np.array([o[0, c].mean() for o in times for c in range(o.shape[1])])
    assert summary["cpu_ms"] == pytest.approx(1e3 * np.median(cpu))
    assert summary["drift"] == pytest.approx(np.median(cpu[3:]) / np.median(cpu[:3]) - 1)
    waited = 1 - sum(o[0].sum() for o in times) / sum(o[1].sum() for o in times)
    assert summary["waiting"] == pytest.approx(waited)
    counts = {key: summary[key] for key in ("batch", "inputs", "rounds", "openings", "load")}
    assert counts == {"batch": 8, "inputs": 3, "rounds": 84, "openings": 2, "load": 1.5}


def test_by_the_wall_blocks_count_by_their_medians():
    rng = np.random.default_rng(1)
    times = {name: [rng.uniform(1, 2, (2, 2, 3, 5)) for _ in range(2)] for name in "ab"}
    wall = Latencies(1, times, "wall")
    blocks = {
        name: [sum(np.median(o[1, c, i]) for i in range(3)) for o in times[name] for c in range(2)]
        for name in "ab"
    }
    ratios = np.array(blocks["b"]) / blocks["a"]
    assert wall.ratio("b", "a")["value"] == pytest.approx(np.exp(np.median(np.log(ratios))))
    drift = np.median(blocks["a"][2:]) / np.median(blocks["a"][:2]) - 1
    assert wall.summary("a")["drift"] == pytest.approx(drift)


def test_no_time_is_waited_for_where_clocks_differ():
    times = [np.stack([np.full((2, 1, 1), 1.1), np.ones((2, 1, 1))])]
    assert Latencies(1, {"a": times}, "cpu").summary("a")["waiting"] == 0


def test_precision_is_half_the_width():
    # Of seven openings, the interval is from the least to the greatest.
    values = (0.75, 0.875, 1.0, 1.0, 1.0, 1.125, 1.25)
    alone = Latencies(1, {"a": [np.full((2, 1, 1, 1), value) for value in values]})
    assert alone.summary("a")["ci95"] == [750, 1250]
    assert alone.precise(0.25)
    assert not alone.precise(0.2499)
