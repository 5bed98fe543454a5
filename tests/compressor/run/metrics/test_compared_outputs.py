"""What a comparison with the float model counts: outputs that say something of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compressor.errors import DataError
from compressor.graph.output_parts import WHOLE, compared_outputs
from compressor.run.data import Data
from compressor.run.evaluate import evaluate
from compressor.run.metrics.judged import compared_parts
from compressor.run.metrics.metrics import resolve_metric
from compressor.spec.user_code import load_symbol
from compressor.types.carrier import Capability
from compressor.types.data import SourceInfo
from compressor.types.tensors import Batch

GRAPH = ir.from_onnx_text(
    '<ir_version: 10, opset_import: ["" : 21]> g (float[n,4] x) => (float[n,4] y, float[n,2] grid, '
    "int64[n,1] kind) { y = Relu(x) kind = ArgMax<axis=1>(x) n = Shape<start=0,end=1>(x) "
    "two = Constant<value_ints=[2]>() to = Concat<axis=0>(n, two) "
    "point = Constant<value_floats=[1.0,2.0]>() grid = Expand(point, to) }"
)
PARTS = (WHOLE, (), ())


def parts(offers: Any = (Capability.GRAPH,), feeds: bool = False, judged: Any = None) -> Any:
    carrier: Any = SimpleNamespace(offers=set(offers), graph=lambda: GRAPH)
    recurrence = judged and SimpleNamespace(judged=judged)
    data: Any = SimpleNamespace(feeds=feeds, recurrence=recurrence)
    return compared_parts(carrier, data)


def test_a_grid_and_the_numbers_of_classes_have_no_part() -> None:
    assert parts() == parts(feeds=True) == PARTS
    assert parts(judged=(0, 2)) == (WHOLE, ())
    assert parts(judged=(1, 2)) == (), "where there is nothing else, these count"
    assert parts(offers=()) == ()


@dataclass(frozen=True)
class Rows:
    def info(self) -> SourceInfo:
        return SourceInfo(4, ())

    def digest(self) -> str:
        return "rows"

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        assert limit is None
        yield {"x": np.eye(size, dtype=np.float32)}


class Runs:
    runtime = "numpy"

    def __init__(self, lost: float, grid: float, kind: int):
        self.lost, self.grid, self.kind = lost, grid, kind

    def run(self, batch: Batch) -> Batch:
        x = batch["x"]
        return {
            "y": x + self.lost * x[:, ::-1],
            "grid": np.broadcast_to(np.float32([1, self.grid]), (4, 2)),
            "kind": x.argmax(1)[:, None] * self.kind,
        }


def test_what_does_not_count_hides_no_loss_and_is_named_where_it_changes() -> None:
    metric = resolve_metric("cosine", False, load_symbol, "s:1", parts=PARTS)
    data = Data("evaluation", Rows(), None, 4, "", "spec.yaml:3")
    found = evaluate(Runs(0.75, 3, 5), Runs(0, 2, 1), data, metric)
    assert found.metric["value"] == pytest.approx(0.8)
    assert set(found.unread) == {"grid", "kind"}


@pytest.mark.parametrize("name", ["mse", "cosine"])
def test_numbers_of_classes_are_no_quantities(name: str) -> None:
    """One sample that went from class 0 to 9 counted 81 times as much as one from 0 to 1."""
    metric = resolve_metric(name, False, load_symbol, "s:1", parts=PARTS)
    data = Data("evaluation", Rows(), None, 4, "", "spec.yaml:3")
    found = evaluate(Runs(0, 2, 9), Runs(0, 2, 1), data, metric)
    assert found.metric["value"] == float(metric.higher_is_better)


@pytest.mark.parametrize(("kind", "counts"), [("int16", False), ("uint32", False), ("uint8", True)])
def test_integers_of_a_byte_are_codes(kind: str, counts: bool) -> None:
    graph = GRAPH.clone()
    graph.graph.outputs[2].dtype = ir.DataType[kind.upper()]
    assert compared_outputs(graph) == (True, False, counts)


def test_a_single_number_that_does_not_count_is_no_reason_to_refuse_the_cosine() -> None:
    shapes = {"y": ("n", 4), "grid": ("n", 2), "kind": ("n", 1)}
    resolve_metric("cosine", False, load_symbol, "s:1", parts=PARTS).check_fit(shapes)
    with pytest.raises(DataError, match="output 'kind', which has one number"):
        resolve_metric("cosine", False, load_symbol, "s:1").check_fit(shapes)


def test_an_output_that_is_joined_of_parts_is_looked_at() -> None:
    """Its parts have names of their own."""
    joined = ((slice(None), slice(0, 2)), (slice(None), slice(2, 4)))
    metric = resolve_metric("mse", False, load_symbol, "s:1", parts=(joined, WHOLE, ()))
    data = Data("evaluation", Rows(), None, 4, "", "spec.yaml:3")
    assert set(evaluate(Runs(1, 3, 5), Runs(0, 2, 1), data, metric).unread) == {"kind"}
