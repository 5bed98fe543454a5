"""Collection: one pass, shared states, and errors that name the sample."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
import torch

from compressor.calibration import histogram
from compressor.calibration.collect import collect, collect_statistics, make_observer
from compressor.calibration.portions import Portion, Portions
from compressor.errors import DataError
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.statistics import Observer, Range, Request
from compressor.types.tensors import Batch, TensorSpec


class Total(Observer[float, float]):
    """An observer that is not of a range, as third parties write them."""

    name: ClassVar[str] = "total"

    def start(self) -> float:
        return 0.0

    def update(self, state: float, values: torch.Tensor) -> float:
        return state + float(values.sum())

    def merge(self, first: float, second: float) -> float:
        return first + second

    def result(self, state: float) -> float:
        return state

    def placeholder(self) -> float:
        return 0.0


def made(name, options):
    """Make an observer of the catalog, or the one above."""
    return Total(**options) if name == "total" else make_observer(name, options)


@pytest.fixture(autouse=True)
def total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.calibration.collect.make_observer", made)


def always(array):
    """Return a model whose only tensor ``y`` is this array."""
    return lambda _batch: {"y": array}


def batches(count=4, size=8):
    random = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": random.standard_normal((size, 3, 5), np.float32)}


def run(batch: Batch) -> Batch:
    x = batch["x"]
    return {"x": x, "relu": np.maximum(x, 0), "tokens": x.reshape(-1, 5), "mean": x.mean((1, 2))}


REQUESTS = [
    Request("x", "min-max"),
    Request("x", "entropy"),
    Request("x", "mse", {"bits": 4}),
    Request("x", "mse", {"bits": 8}),
    Request("x", "extreme-value"),
    Request("relu", "extreme-value"),
    Request("mean", "extreme-value"),
    Request("mean", "min-max"),
    Request("relu", "percentile", {"percentile": 99.0}),
    Request("relu", "moving-average", {"constant": 0.5}),
    Request("relu", "moving-average", {"constant": 0.1}),
    Request("mean", "total"),
]


def test_results_are_those_of_observing_everything():
    results = collect(run, batches(), REQUESTS)
    assert list(results) == [request.key for request in REQUESTS]
    for request in REQUESTS:
        observer = made(request.observer, request.options)
        state = observer.start()
        for batch in batches():
            state = observer.update(state, torch.from_numpy(run(batch)[request.tensor]))
        assert results[request.key] == observer.result(state)


def test_tensors_are_observed_on_as_many_threads_as_torch_uses(monkeypatch):
    seen, update = set(), Total.update

    def noting(self, state, values):
        seen.add(threading.current_thread().name)
        time.sleep(0.01)
        return update(self, state, values)

    monkeypatch.setattr(Total, "update", noting)
    requests = [*REQUESTS, *(Request(name, "total") for name in ("x", "relu", "tokens"))]
    before, results = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(collect(run, batches(), requests))
    torch.set_num_threads(before)
    assert results[0] == results[1]
    assert len(seen) > 2, "the caller's, and several"


def test_of_several_tensors_that_are_not_finite_the_first_is_named():
    spoiled = {"x": np.full((8, 2), np.nan, np.float32), "y": np.full((8, 2), np.inf, np.float32)}
    requests = [Request("y", "min-max"), Request("x", "min-max")]
    with pytest.raises(DataError, match="tensor 'y'"):
        collect(lambda _: spoiled, batches(), requests)


def test_histograms_are_shared_and_equal_requests_observed_once(monkeypatch):
    calls = []
    observe = histogram.observe

    def counting(state, values, ends=None):
        calls.append(tuple(values.shape))
        return observe(state, values, ends)

    monkeypatch.setattr(histogram, "observe", counting)
    collect(run, batches(count=3), [*REQUESTS, *REQUESTS])
    assert len(calls) == 2 * 3, "one histogram each of x and relu, for each of three batches"


def test_extremes_are_looked_for_once_a_tensor(monkeypatch):
    searched = [0]
    for name in ("chunk_extrema", "_finite"):
        search = getattr(histogram, name)

        def counting(*values, search=search):
            searched[0] += 1
            return search(*values)

        monkeypatch.setattr(histogram, name, counting)
    requests = [Request("x", name) for name in ("mse", "min-max", "extreme-value", "percentile")]
    found = collect(run, batches(count=1, size=8), requests)
    assert searched == [2 * 8], "the least and the greatest value of each sample"
    spans = Request("x", "channel-spans")
    together = collect(run, batches(count=1, size=8), [*requests, spans])
    assert searched == [2 * 8], "those of each channel tell them"
    assert {request.key: together[request.key] for request in requests} == found
    collect(run, batches(count=1, size=8), [spans])
    assert searched == [2 * 8]


def test_one_pass_and_progress():
    runs = []
    seen = []

    def counting(batch):
        runs.append(len(batch["x"]))
        return run(batch)

    collect(counting, batches(count=3), REQUESTS, seen.append)
    assert runs == [8, 8, 8]
    assert seen == [8, 16, 24]


@pytest.mark.parametrize(
    "observer", ["min-max", "entropy", "moving-average", "total", "channel-spans"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["x", "tokens"])
def test_a_value_that_is_not_finite_is_located(observer, value, tensor):
    def spoiled():
        for index, batch in enumerate(batches()):
            if index == 2:
                batch["x"][5, 1, 2:4] = value
                batch["x"][7, 0, 0] = value
            yield batch

    with pytest.raises(DataError) as caught:
        collect(run, spoiled(), [Request(tensor, observer)])
    text = str(caught.value)
    assert f"tensor '{tensor}'" in text
    assert "3 of 120 values are not finite" in text
    assert "sample 21" in text  # two batches of eight before, the sixth of its own


def test_one_number_a_sample_is_a_sample():
    """A batch of them was one, so that the range depended on the size of batches."""
    values = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    request = Request("y", "extreme-value")
    found = {
        collect(dict, [{"y": part} for part in np.split(shaped, count)], [request])[request.key]
        for shaped in (values, values[:, None])
        for count in (1, 8, 32)
    }
    assert len(found) == 1


def test_where_no_axis_is_the_batch_the_error_names_its_samples():
    def reduced(batch):
        return {"y": np.full((3, 2), np.nan, np.float32)}

    with pytest.raises(DataError, match="samples 0 to 7"):
        collect(reduced, batches(), [Request("y", "min-max")])


def test_an_observers_own_error_is_not_mistaken(monkeypatch):
    def refuse(self, state, values):
        raise ValueError("something else")

    monkeypatch.setattr(Total, "update", refuse)
    with pytest.raises(ValueError, match="something else"):
        collect(run, batches(), [Request("mean", "total")])


def test_no_data_no_tensor_no_values():
    with pytest.raises(DataError, match="has no samples"):
        collect(run, [], REQUESTS)
    with pytest.raises(DataError, match="tensor 'y': was not computed"):
        collect(run, batches(), [Request("y", "min-max")])
    with pytest.raises(DataError, match="tensor 'y': cannot be calibrated: no values"):
        collect(always(np.zeros((8, 0))), batches(), [Request("y", "mse")])


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint16, np.int64, np.float16, np.float64, ml_dtypes.bfloat16]
)
def test_dtypes(dtype):
    array = np.array([0, 1, 1]).astype(dtype)
    results = collect(always(array), batches(), [Request("y", "mse")])
    (found,) = results.values()
    assert found.low == 0
    assert found.high == pytest.approx(1, rel=1e-2)


def test_arrays_that_torch_does_not_take_as_they_are():
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    for array in (frozen, frozen[::-1], frozen.T, np.array(5.0)):
        results = collect(always(array), batches(), [Request("y", "min-max")])
        assert list(results.values()) == [Range(0.0, 5.0)]


@pytest.mark.parametrize(
    ("observer", "most"), [("min-max", 64), ("mse", 64), ("second-moment", 128)]
)
def test_ranges_alone_are_observed_in_smaller_portions(
    monkeypatch: pytest.MonkeyPatch, observer: str, most: int
):
    """Sums of floats would depend on the size of portions; ranges do not."""
    sizes: list[int] = []

    class Watched(Portions):
        def of(self, batch: Batch) -> Iterator[Portion]:
            sizes.append(self._most)
            return super().of(batch)

    monkeypatch.setattr("compressor.calibration.collect.Portions", Watched)
    carrier = TorchCarrier(torch.nn.Linear(2, 2), (TensorSpec("x", ("batch", 2), "float32"),))
    requests = [Request("x", "min-max"), Request("output", observer)]
    collect_statistics(carrier, [{"x": np.ones((2, 2), np.float32)}], requests)
    assert sizes == [most << 20]
