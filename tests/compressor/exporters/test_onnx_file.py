"""A file that is not what was meant to be written is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from compressor.errors import ArtifactError
from compressor.exporters import OnnxExporter
from compressor.exporters.onnx.file import check_file, described
from compressor.models.onnx.carrier import OnnxCarrier
from tests.compressor.exporters.hand_made import CONTEXT, quantized


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return OnnxExporter().write(quantized(), tmp_path, CONTEXT)[0]


def _tensor(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def _add_float_copy(model: onnx.ModelProto) -> None:
    weight = np.zeros((64, 512), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "first.weight_float"))


def _retype(model: onnx.ModelProto) -> None:
    _tensor(model, "first.weight").data_type = onnx.TensorProto.UINT8


def _shorten(model: onnx.ModelProto) -> None:
    _tensor(model, "first.weight").raw_data = b"\0" * 10


def _rename_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "QuantizeLinearly"


def _drop(model: onnx.ModelProto) -> None:
    model.graph.initializer.remove(_tensor(model, "second.bias"))
    model.graph.input.append(
        onnx.helper.make_tensor_value_info("second.bias", onnx.TensorProto.FLOAT, [10])
    )


def _opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 22


DAMAGE: list[tuple[Callable[[onnx.ModelProto], None], str]] = [
    (_add_float_copy, "'first.weight_float' that the model does not have"),
    (_retype, r"holds 'first.weight' as uint8\[64, 512\], not int8\[64, 512\]"),
    (_shorten, "first.weight"),
    (_rename_operator, "refused by the onnx checker .*QuantizeLinearly"),
    (_drop, "lacks the initializer 'second.bias'"),
    (_opset, "has opset 22, not 21"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_found(
    damage: Callable[[onnx.ModelProto], None], message: str, written: Path
) -> None:
    model = onnx.load(written)
    expected = described(model)
    check_file(written, 21, expected)
    damage(model)
    onnx.save(model, written)
    with pytest.raises(ArtifactError, match=message):
        check_file(written, 21, expected)


def test_a_float_weight_left_beside_its_codes_is_found(tmp_path: Path) -> None:
    graph = quantized().graph()
    left = ir.tensor(np.zeros((64, 512), np.float32), name="first.weight_before")
    value = ir.val("first.weight_before", left.dtype, left.shape, const_value=left)
    graph.graph.register_initializer(value)
    with pytest.raises(ArtifactError, match=r"'first.weight_before', which nothing reads"):
        OnnxExporter(target="tensorrt").write(OnnxCarrier(graph), tmp_path, CONTEXT)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_a_cut_file_does_not_open(keep: float, written: Path) -> None:
    content = written.read_bytes()
    written.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ArtifactError, match=r"ONNX Runtime .* does not load it"):
        OnnxExporter().open(written)


def test_a_missing_file_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        OnnxExporter().open(tmp_path / "model.onnx")


def test_the_checker_gets_no_weights(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would copy all of them several times: 1.8 GB for a BERT-base.
    sizes = []
    check = onnx.checker.check_model

    def recorded(model: onnx.ModelProto, **options: bool) -> None:
        sizes.append(model.ByteSize())
        check(model, **options)

    monkeypatch.setattr(onnx.checker, "check_model", recorded)
    check_file(written, 21, described(onnx.load(written)))
    assert 0 < sizes[0] < written.stat().st_size / 4
