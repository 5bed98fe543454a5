"""Files to measure, and measuring in a moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from compressor.run.timing import cold_rounds, timing

Shape = tuple[int | str, ...]
SaveOnnx = Callable[..., Path]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open each model twice, and start it cold once."""
    monkeypatch.setattr(timing, "_LEAST_OPENINGS", 2)
    monkeypatch.setattr(cold_rounds, "ROUNDS", 1)


@pytest.fixture
def save(tmp_path: Path) -> SaveOnnx:
    """Save a model of one operator, which keeps the shape of its input."""

    def saved(
        name: str = "model.onnx",
        shape: Shape = ("batch", 3),
        *,
        takes: str = "x",
        operator: str = "Relu",
        dtype: int = TensorProto.FLOAT,
    ) -> Path:
        ends = [helper.make_tensor_value_info(n, dtype, shape) for n in (takes, "y")]
        node = helper.make_node(operator, [takes], ["y"])
        graph = helper.make_graph([node], "one", ends[:1], ends[1:])
        opset = [helper.make_opsetid("", 17)]
        path = tmp_path / name
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
        return path

    return saved
