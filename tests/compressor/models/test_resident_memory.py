"""Weights in files take room in a process only while they are read."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor.calibration.collect import collect_statistics
from compressor.models.onnx import ort_runner
from compressor.models.onnx.carrier import OnnxCarrier, restore_graph
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.resident_memory import forget_pages
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.tensors import Batch
from tests.compressor.passes.quantize.static_models import ORT, Given

SIDE = 1024


def resident(folder: Path) -> int:
    """Return the bytes of this process's pages of the files in a folder."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.fixture
def transposing(tmp_path: Path) -> OnnxCarrier:
    """Return a model that transposes its weights, one of them twice, restored from a folder."""
    rng = np.random.default_rng(0)
    names = {"a": "first", "b": "second", "c": "second"}
    made = [helper.make_node("Transpose", [w], [f"{n}.T"], perm=[1, 0]) for n, w in names.items()]
    made += [
        helper.make_node("MatMul", [x, f"{n}.T"], [y])
        for x, n, y in (("x", "a", "p"), ("p", "b", "q"), ("q", "c", "r"))
    ]
    made.append(helper.make_node("MatMul", ["r", "first"], ["y"]))
    shapes = {"first": (2 * SIDE, SIDE), "second": (2 * SIDE, 2 * SIDE)}
    weights = {n: rng.standard_normal(s, np.float32) / SIDE for n, s in shapes.items()}
    graph = helper.make_graph(
        made,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIDE])],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    OnnxCarrier(ir.from_proto(model)).save(tmp_path)
    return restore_graph(tmp_path)


def test_weights_are_transposed_before_a_session_starts(
    transposing: OnnxCarrier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = {"x": np.random.default_rng(1).standard_normal((3, SIDE), np.float32)}
    (y,) = transposing.runner().run(x).values()
    assert resident(tmp_path) < SIDE * SIDE
    given: list[dict[str, tuple[int, ...]]] = []

    class Recorded(OrtRunner):
        def __init__(self, model: bytes, subject: str, **options: Any) -> None:
            given.append({n: a.shape for n, a in options["weights"].items()})
            super().__init__(model, subject, **options)

    monkeypatch.setattr(ort_runner, "OrtRunner", Recorded)
    assert np.array_equal(next(iter(transposing.runner(["q"]).run(x).values())), y)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert np.array_equal(next(iter(transposing.runner().run(x).values())), y)
    tall, square, wide = (2 * SIDE, SIDE), (2 * SIDE, 2 * SIDE), (SIDE, 2 * SIDE)
    assert given[0] == {"first": tall, "a.T": wide, "b.T": square, "c.T": square}
    assert given[1] == {"first": tall, "second": square}


@pytest.fixture
def carrier(tmp_path: Path) -> OnnxCarrier:
    """Return a model of two products, restored from a folder."""
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((SIDE, SIDE), np.float32) for n in ("first", "second")}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["inner"]),
            helper.make_node("MatMul", ["inner", "second"], ["y"]),
        ],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIDE])],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    OnnxCarrier(ir.from_proto(model)).save(tmp_path)
    return restore_graph(tmp_path)


def test_a_session_leaves_no_pages_of_mapped_weights(carrier: OnnxCarrier, tmp_path: Path) -> None:
    weights = {n: v.const_value for n, v in carrier.graph().graph.initializers.items()}
    first, second = (np.array(t.numpy()) for t in weights.values() if t is not None)
    assert resident(tmp_path) >= 2 * SIDE * SIDE * 4
    runner = carrier.runner()
    assert resident(tmp_path) < SIDE * SIDE
    x = np.random.default_rng(1).standard_normal((3, SIDE), np.float32)
    (y,) = runner.run({"x": x}).values()
    np.testing.assert_allclose(y, x @ first @ second, rtol=1e-3, atol=1e-2)
    # Who reads them, gets them again.
    again = [np.array(t.numpy()) for t in weights.values() if t is not None]
    assert np.array_equal(again, [first, second])


@pytest.mark.parametrize("changed", [False, True])
def test_pages_that_were_changed_stay(tmp_path: Path, changed: bool) -> None:
    values = np.arange(SIDE * SIDE, dtype=np.float32)
    np.save(tmp_path / "values.npy", values)
    mapped = np.load(tmp_path / "values.npy", mmap_mode="c")  # as a checkpoint is
    assert mapped.sum(dtype=np.float64) == values.sum(dtype=np.float64)
    middle = SIDE * SIDE // 2
    mapped[middle : middle + changed] = -1
    before = resident(tmp_path)
    forget_pages([mapped, values])
    assert resident(tmp_path) == before if changed else resident(tmp_path) < before / 100
    assert mapped[middle] == (-1 if changed else middle)
    assert np.array_equal(values, np.arange(SIDE * SIDE))  # which lie in no file


def test_scaled_weights_leave_no_pages_of_those_before(carrier: OnnxCarrier, tmp_path: Path):
    """While a model with scaled channels is run again, it is there once."""
    random = np.random.default_rng(2)
    uneven = np.exp2(random.uniform(-4, 4, SIDE)).astype(np.float32)
    first = carrier.tensors()["first"].read() / torch.from_numpy(uneven)[:, None]
    folder = tmp_path / "uneven"
    folder.mkdir()
    carrier.with_weights({"first": first}).save(folder)
    given = restore_graph(folder)
    held: list[int] = []

    class Watched(Given):
        def batches(self) -> Iterator[Batch]:
            held.append(resident(folder))
            return super().batches()

    samples = Watched([{"x": random.standard_normal((8, SIDE), np.float32) * uneven}])

    declared = QuantizeStatic.model_validate({"weights": {"rounding": "nearest"}})
    context = replace(ORT, samples=samples)
    requests = declared.survey(given, context).requests
    statistics = collect_statistics(given, samples.batches(), requests)
    assert declared.apply(given, context, statistics).notes
    assert len(held) == 2
    assert held[1] < SIDE * SIDE
