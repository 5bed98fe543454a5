"""Threads reach all runtimes on the processor, and none of them spins."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from compressor.exporters import OnnxExporter
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.threads import on_threads


@pytest.fixture
def model(tmp_path: Path) -> Path:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What ONNX Runtime was asked for, session by session."""
    import onnxruntime as ort

    asked: list[Mapping[str, Any]] = []
    start: Callable[..., Any] = ort.InferenceSession

    def session(model: Any, options: Any, *providers: Any, **how: Any) -> Any:
        spinning = options.get_session_config_entry("session.intra_op.allow_spinning")
        asked.append({"threads": options.intra_op_num_threads, "spinning": spinning})
        return start(model, options, *providers, **how)

    monkeypatch.setattr(ort, "InferenceSession", session)
    return asked


def test_sessions_have_the_threads_and_do_not_spin(
    model: Path, sessions: list[Mapping[str, Any]]
) -> None:
    OrtRunner(model, "model")
    with on_threads(1):
        OnnxExporter().open(model)
        with on_threads(2):
            OrtRunner(model, "model")
        OrtRunner(model, "model")
        OrtRunner(model, "model", 3)
    OrtRunner(model, "model")
    assert [s["threads"] for s in sessions] == [0, 1, 2, 1, 3, 0]
    assert {s["spinning"] for s in sessions} == {"0"}


def test_pytorch_has_them_inside_alone() -> None:
    before = torch.get_num_threads()
    with on_threads(3):
        assert torch.get_num_threads() == 3
        with on_threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    with on_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
