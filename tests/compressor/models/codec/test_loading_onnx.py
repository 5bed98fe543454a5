"""``compressor.load`` of ONNX files that other people wrote."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import compressor
from compressor.errors import ModelError, SpecError
from compressor.models.element_types import from_numpy, to_numpy
from tests.compressor.models.test_onnx_wild import MODELS, session
from tests.compressor.models.wild_models import Wild

FLOAT = TensorProto.FLOAT


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def one_node(
    node: onnx.NodeProto, opset: int = 21, shape: tuple[int, ...] = (2, 3), **weights: np.ndarray
) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.acme", 1)]
    opsets.append(helper.make_opsetid("com.microsoft", 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def assert_as_the_runtime(path: Path, sample: Wild) -> torch.nn.Module:
    module, reference = compressor.load(path), session(path)
    assert not module.training
    for seed in range(2):
        batch = sample.inputs(seed)
        given = {name: from_numpy(ir.tensor(array)) for name, array in batch.items()}
        outputs = module(**given)
        names = [output.name for output in reference.get_outputs()]
        wanted = dict(zip(names, reference.run(None, batch), strict=True))
        assert outputs.keys() == wanted.keys()
        for name, array in wanted.items():
            ours = to_numpy(outputs[name])
            assert ours.dtype == array.dtype
            np.testing.assert_allclose(ours, array, rtol=1e-2, atol=1e-3)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_a_file_runs_in_pytorch_as_in_the_runtime(tmp_path: Path, name: str) -> None:
    sample = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = assert_as_the_runtime(saved(sample.model, tmp_path), sample)
    assert module.state_dict()


HARDMAX = one_node(helper.make_node("Hardmax", ["x"], ["y"]))


def test_what_pytorch_does_not_run_is_run_by_the_runtime(tmp_path: Path) -> None:
    path = saved(HARDMAX, tmp_path)
    with pytest.warns(
        UserWarning, match=r"model\.onnx' is executed by onnxruntime .*does not run Hardmax here"
    ) as caught:
        module = compressor.load(path)
    assert caught[0].filename == __file__  # about the caller's line
    assert "onnxruntime" in str(module.runtime)
    assert module(torch.tensor([[1.0, 3, 2]] * 2))["y"].tolist() == [[0, 1, 0]] * 2
    with pytest.raises(SpecError, match=r"device 'meta': is not usable: .*ONNX Runtime on the CPU"):
        compressor.load(path, device="meta")


def test_a_form_of_an_operator_that_pytorch_does_not_run(tmp_path: Path) -> None:
    inputs = ["x", "codes", "scales", "", "order"]
    sizes = {"K": 16, "N": 2, "bits": 4, "block_size": 16}
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **sizes)
    weights = {
        "codes": np.full((2, 1, 8), 0x99, np.uint8),  # 9 stands for 1
        "scales": np.ones(2, np.float32),
        "order": np.zeros(16, np.int32),
    }
    path = saved(one_node(node, shape=(2, 16), **weights), tmp_path)
    with pytest.warns(UserWarning, match=r"not run it here \(.*MatMulNBits.*g_idx"):
        module = compressor.load(path)
    assert module(torch.ones(2, 16))["y"].flatten().tolist() == [16.0] * 4


def test_an_opset_before_those_of_the_executor(tmp_path: Path) -> None:
    """Axes are attributes there."""
    node = helper.make_node("Squeeze", ["x"], ["y"], axes=[0])
    path = saved(one_node(node, 9, (1, 3)), tmp_path)
    x = torch.arange(3.0)[None]
    assert torch.equal(compressor.load(path)(x)["y"], x[0])


def test_external_data_may_go_away_if_it_is_not_mapped(tmp_path: Path) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    model = one_node(helper.make_node("MatMul", ["x", "w"], ["y"]), w=weight)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=0)
    module = compressor.load(path, mmap=False, dequantize="once")
    (tmp_path / "w.data").unlink()
    assert torch.equal(module(torch.ones(2, 3))["y"], torch.ones(2, 3) @ torch.from_numpy(weight))


def text(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING


def sequence(model: onnx.ModelProto) -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, [2]))
    model.graph.output[0].type.CopyFrom(kind)


def foreign(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type, model.graph.node[0].domain = "Swirl", "com.acme"


def misspelt(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Rellu"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (text, r"input 'x' is text; cut off what works on text"),
        (sequence, r"output 'y' is a sequence; inputs and outputs have to be tensors"),
        (foreign, r"neither PyTorch nor ONNX Runtime has the operator com\.acme\.Swirl"),
        (misspelt, r"ONNX Runtime .* does not load it \(.*Rellu"),
    ],
)
def test_what_cannot_be_loaded(
    tmp_path: Path, spoil: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = one_node(helper.make_node("Relu", ["x"], ["y"]))
    spoil(model)
    with pytest.raises(ModelError, match=message):
        compressor.load(saved(model, tmp_path))


def test_a_path_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.onnx': does not exist"):
        compressor.load(tmp_path / "gone.onnx")
    (tmp_path / "cut.onnx").write_bytes(b"\x08\x07\x12")
    with pytest.raises(ModelError, match=r"cut\.onnx': is not an ONNX file"):
        compressor.load(tmp_path / "cut.onnx")
    (tmp_path / "model.tflite").write_bytes(b"\x1c\x00\x00\x00TFL3")
    with pytest.raises(ModelError, match=r"model\.tflite': is no file that load reads; open it in"):
        compressor.load(tmp_path / "model.tflite")


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    file = saved(one_node(helper.make_node("Relu", ["x"], ["y"])), tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    assert compressor.load(tmp_path)(torch.tensor([[-1.0, 2.0, 0.0]] * 2))["y"].max() == 2
    (tmp_path / "other.onnx").write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"model\.json"):  # which of them, nobody knows
        compressor.load(tmp_path)
