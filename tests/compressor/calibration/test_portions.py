"""Batches in portions: which, and that statistics do not depend on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx_ir import from_proto

from compressor.calibration.collect import collect
from compressor.calibration.portions import Portions
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.statistics import Request
from compressor.types.tensors import Batch

REQUESTS = [
    Request("x", "min-max"),
    Request("x", "moving-average", {"constant": 0.3}),
    Request("x", "mse"),
    Request("y", "entropy"),
    Request("y", "extreme-value"),
    Request("x", "extreme-value", where="y"),
    Request("x", "second-moment", {"rows_per_column": 1}),
    Request("x", "column-norm"),
    Request("x", "channel-magnitude"),
    Request("table", "mse"),
]


def carrier(batch: str | int = "batch", operator: str = "Relu") -> OnnxCarrier:
    """Return a model of one operator and a table that does not depend on the input."""
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 6])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 6])
    outputs = ["y"] if operator == "Relu" else ["y", "scale", "zero"]
    graph = helper.make_graph(
        [
            helper.make_node(operator, ["x"], outputs),
            helper.make_node("Abs", ["stored"], ["table"]),
        ],
        "network",
        [given],
        [made],
        [helper.make_tensor("stored", TensorProto.FLOAT, [3, 6], np.arange(-9.0, 9.0))],
        value_info=[helper.make_tensor_value_info("table", TensorProto.FLOAT, [3, 6])],
    )
    return OnnxCarrier(from_proto(helper.make_model(graph)))


def run(part: Batch) -> tuple[Batch, ...]:
    table = np.abs(np.arange(-9.0, 9.0, dtype=np.float32)).reshape(3, 6)
    return ({"x": part["x"], "y": np.maximum(part["x"], 0), "table": table},)


def samples(count: int) -> Batch:
    return {"x": np.random.default_rng(count).standard_normal((count, 6), np.float32)}


def cut(count: int, bytes_of_one: int, model: OnnxCarrier | None = None) -> list[int]:
    """Return the sizes of the portions of a batch if a sample may have so many of 1000 bytes."""

    def sized(part: Batch) -> tuple[Batch, ...]:
        return ({"y": np.zeros((len(part["x"]), bytes_of_one), np.uint8)},)

    portions = list(Portions(sized, [model or carrier()], 1000).of(samples(count)))
    assert [p.last for p in portions] == [False] * (len(portions) - 1) + [True]
    assert [p.start for p in portions] == list(np.cumsum([0, *(p.samples for p in portions)])[:-1])
    return [p.samples for p in portions]


def test_a_batch_that_fits_stays_whole():
    assert cut(10, 100) == [10]
    assert cut(1, 10_000) == [1]
    assert cut(2, 10_000) == [2]


@pytest.mark.parametrize(
    ("count", "bytes_of_one", "sizes"),
    [
        (3, 400, [3]),
        (4, 400, [2, 2]),
        (5, 400, [2, 3]),
        (8, 200, [5, 3]),
        (11, 200, [5, 6]),
        (12, 200, [5, 5, 2]),
        (4, 600, [1, 1, 1, 1]),
        (4, 10_000, [1, 1, 1, 1]),
    ],
)
def test_portions_are_as_large_as_memory_allows(count: int, bytes_of_one: int, sizes: list[int]):
    assert cut(count, bytes_of_one) == sizes


def test_one_sample_shows_how_many_fit():
    sizes: list[int] = []

    def counted(part: Batch) -> tuple[Batch, ...]:
        sizes.append(len(part["x"]))
        return run(part)

    pair = 3 * 6 * 4 + 2 * (2 * 6 * 4)  # the table is there once
    for most, largest in ((pair, 2), (pair - 1, 1)):
        sizes.clear()
        portions = list(Portions(counted, [carrier()], most).of(samples(6)))
        assert {p.samples for p in portions} == {largest}
        assert sizes == [1, *[largest] * (6 // largest)]


def test_samples_that_depend_on_each_other_stay_together():
    assert cut(8, 1000, carrier(8)) == [8]
    assert cut(8, 10_000, carrier(8)) == [8]
    assert cut(8, 1000, carrier(operator="DynamicQuantizeLinear")) == [8]


def test_one_scale_for_a_batch_does_not_hold_any_amount_of_memory():
    """Eight samples of a speech network took 7 GB in quantize-dynamic."""
    dynamic = carrier(operator="DynamicQuantizeLinear")
    assert cut(10, 1000, dynamic) == [8, 2]
    assert cut(3, 10_000, dynamic) == [1, 1, 1]


def test_values_that_do_not_depend_on_the_batch_come_once():
    portions = list(Portions(run, [carrier()], 1).of(samples(6)))
    names = [sorted(p.values[0]) for p in portions]
    assert names == [["table", "x", "y"], *[["x", "y"]] * 5]


@pytest.mark.parametrize("most", [1, 300, 1 << 20])
def test_statistics_do_not_depend_on_portions(most: int):
    batches = [samples(count) for count in (7, 12, 5, 1)]
    whole = collect(lambda batch: run(batch)[0], batches, REQUESTS)
    parts = collect(Portions(run, [carrier()], most), batches, REQUESTS)
    for request in REQUESTS:
        one, other = whole[request.key], parts[request.key]
        if request.observer == "second-moment":
            assert one.rows == other.rows
            torch.testing.assert_close(one.second, other.second)
        elif isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other, request.key
