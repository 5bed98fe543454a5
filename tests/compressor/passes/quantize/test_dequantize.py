"""``cast`` with ``dtype: fp32`` makes floats of what others quantized, in whatever form."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from compressor import catalog
from compressor.graph.stored_weights import is_quantized
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.torch.lowering import OPSET
from compressor.passes.quantize.cast.cast import Cast
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from compressor.types.tensors import Array
from tests.compressor.models import test_onnx_wild as wild
from tests.compressor.models import wild_models
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import IMAGES, INT8, ROWS, network, node, run, sqnr

CONTEXT = PassContext()


def opened(model: onnx.ModelProto | Path, folder: Path) -> OnnxCarrier:
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, folder / "guest.onnx")
    return open_onnx(folder / "guest.onnx", OPSET)


def widened(carrier: Carrier) -> Carrier:
    declared = Cast(dtype="fp32")
    declared.survey(carrier, CONTEXT)
    return declared.apply(carrier, CONTEXT, {}).carrier


def outputs(carrier: Carrier, x: Array) -> Array:
    return next(iter(carrier.runner().run({"x": x}).values()))


def operators(carrier: Carrier) -> list[str]:
    return [n.op_type for n in carrier.graph().graph]


@pytest.mark.parametrize(
    "how",
    [
        "QDQ-QUInt8",
        "QDQ-QInt8-tensor",
        "QOperator-QUInt8",
        "QOperator-QInt8-tensor",
        "dynamic-QInt8",
        "dynamic-QUInt8-tensor",
    ],
)
@pytest.mark.parametrize("name", ["convolutional", "recurrent"])
def test_files_of_the_runtimes_quantizer(tmp_path: Path, name: str, how: str) -> None:
    """Closer to the float model than what was quantized: activations are no longer rounded."""
    model: onnx.ModelProto = getattr(guests, name)()
    x = IMAGES if name == "convolutional" else ROWS
    guest = guests.by_runtime(model, how, x, tmp_path)
    before = opened(guest, tmp_path)
    assert is_quantized(before.graph())
    after = widened(before)
    assert not is_quantized(after.graph())
    wanted = {i.name for i in model.graph.initializer if "weight" in i.name or "lstm" in i.name}
    assert {layer.weight for layer in after.layers()} == wanted
    assert {layer.dtype for layer in after.layers()} == {"float32"}
    reference, quantized, ours = run(model, x), run(guest, x), outputs(after, x)
    assert sqnr(reference, ours) >= min(sqnr(reference, quantized) + 1, 40)
    if name == "convolutional":  # what saturation stood for is back
        assert sum(o in ("Relu", "Clip") for o in operators(after)) >= 2


PRODUCT = {"w": np.array([[1, -2], [3, 127]], np.int8), "s": np.array([0.5, 2], np.float32)}
FLOATS = np.array([[0.5, -4], [1.5, 254]], np.float32)


def dequantized(name: str, *sides: str, **settings: Any) -> list[onnx.NodeProto]:
    return [
        node("DequantizeLinear", [name, *sides], ["floats"], **settings),
        node("MatMul", ["x", "floats"], ["y"]),
    ]


X = np.array([[1, 2], [3, -1], [0, 0.5]], np.float32)
PAIR = (guests.FLOAT, ["n", 2])


@pytest.mark.parametrize(
    ("nodes", "arrays", "floats"),
    [
        pytest.param(dequantized("w", "s", axis=1), PRODUCT, FLOATS, id="channels"),
        pytest.param(
            dequantized("w", "s", "z", axis=1),
            {
                "w": np.array([[1, 2], [3, 255]], np.uint8),
                "s": np.array([0.5, 2], np.float32),
                "z": np.array([3, 128], np.uint8),
            },
            np.array([[-1, -252], [0, 254]], np.float32),
            id="asymmetric",
        ),
        pytest.param(  # fake quantization as PyTorch's and TensorFlow's exporters write it
            [node("QuantizeLinear", ["v", "s", "z"], ["w"]), *dequantized("w", "s", "z")],
            {"v": np.array([[0.6, 9], [-0.2, 1e9]], np.float32), "s": np.float32(0.5)}
            | {"z": np.int8(0)},
            np.array([[0.5, 9], [0, 63.5]], np.float32),
            id="fake",
        ),
        pytest.param(
            [
                node("DequantizeLinear", ["w", "s"], ["t"], axis=0),
                node("Transpose", ["t"], ["floats"], perm=[1, 0]),
                node("MatMul", ["x", "floats"], ["y"]),
            ],
            PRODUCT,
            np.array([[0.5, 6], [-1, 254]], np.float32),
            id="turned",
        ),
        pytest.param(
            [
                node("Cast", ["w"], ["c"], to=guests.FLOAT),
                node("Sub", ["c", "z"], ["d"]),
                node("Mul", ["d", "s"], ["floats"]),
                node("MatMul", ["x", "floats"], ["y"]),
            ],
            {**PRODUCT, "z": np.float32(1)},
            np.array([[0, -6], [1, 252]], np.float32),
            id="arithmetic",
        ),
        pytest.param(
            [node("MatMulIntegerToFloat", ["c", "w", "one", "s"], ["y"], domain="com.microsoft")],
            PRODUCT,
            FLOATS,
            id="integers",
        ),
        pytest.param(
            [node("DynamicQuantizeMatMul", ["x", "w", "s"], ["y"], domain="com.microsoft")],
            PRODUCT,
            FLOATS,
            id="dynamic",
        ),
    ],
)
def test_weights_are_what_their_codes_stand_for(
    tmp_path: Path, nodes: list[onnx.NodeProto], arrays: Mapping[str, Array], floats: Array
) -> None:
    if nodes[0].input[0] == "c":  # codes of the input, by a scale of 1
        arrays = {**arrays, "one": np.float32(1)}
        nodes = [node("QuantizeLinear", ["x", "one"], ["c"]), *nodes]
    x = np.abs(np.round(X))
    carrier = opened(network(nodes, arrays, PAIR), tmp_path)
    after = widened(carrier)
    assert not is_quantized(after.graph())
    np.testing.assert_array_equal(outputs(after, x), x @ floats)
    (layer,) = after.layers()
    assert layer.name == ("v" if "v" in arrays else "w")
    assert sqnr(x @ floats, run(tmp_path / "guest.onnx", x)) > 40


def test_inputs_and_outputs_that_are_codes_stay_so(tmp_path: Path) -> None:
    """As converters of TensorFlow's integer models write them."""
    nodes = [
        node("DequantizeLinear", ["x", "s", "z"], ["a"]),
        node("DequantizeLinear", ["w", "ws"], ["b"], axis=0),
        node("Gemm", ["a", "b"], ["c"], transB=1),
        node("QuantizeLinear", ["c", "t", "z"], ["d"]),
        node("DequantizeLinear", ["d", "t", "z"], ["e"]),
        node("Relu", ["e"], ["f"]),
        node("QuantizeLinear", ["f", "t", "z"], ["y"]),
    ]
    arrays = {
        "s": np.float32(0.1),
        "z": np.int8(3),
        "t": np.float32(0.5),
        "w": np.array([[1, -2], [3, 127]], np.int8),
        "ws": np.array([0.5, 0.25], np.float32),
    }
    guest = network(nodes, arrays, (INT8, ["n", 2]), (INT8, ["n", 2]))
    after = widened(opened(guest, tmp_path))
    assert operators(after) == ["DequantizeLinear", "Gemm", "Relu", "QuantizeLinear"]
    x = np.array([[100, -7], [3, 4]], np.int8)
    assert np.abs(run(guest, x).astype(int) - outputs(after, x)).max() <= 1
    assert outputs(after, x).dtype == np.int8


def test_a_table_of_codes(tmp_path: Path) -> None:
    codes = GENERATOR.integers(0, 255, (50, 8)).astype(np.uint8)
    nodes = [
        node("Gather", ["w", "x"], ["c"]),
        node("DequantizeLinear", ["c", "s", "z"], ["y"]),
    ]
    arrays = {"w": codes, "s": np.float32(0.1), "z": np.uint8(7)}
    guest = network(nodes, arrays, (guests.TensorProto.INT64, ["n"]))
    after = widened(opened(guest, tmp_path))
    assert operators(after) == ["Gather"]
    x = np.array([3, 49, 0])
    np.testing.assert_array_equal(outputs(after, x), run(guest, x))


GENERATOR = np.random.default_rng(11)


@pytest.mark.parametrize(
    ("bits", "zero"),
    [(2, None), (2, "codes"), (4, None), (4, "codes"), (4, "floats"), (8, None), (8, "codes")],
)
def test_codes_that_share_bytes(tmp_path: Path, bits: int, zero: str | None) -> None:
    """The last block is cut."""
    rows, columns, block = 3, 40, 16
    sizes = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    arrays: dict[str, Array] = {
        "w": GENERATOR.integers(0, 255, (rows, 3, block * bits // 8)).astype(np.uint8),
        "s": GENERATOR.random(rows * 3).astype(np.float32),
    }
    inputs = ["x", "w", "s"]
    if zero is not None:
        packed = GENERATOR.integers(0, 255, (rows, -(-3 * bits // 8))).astype(np.uint8)
        floats = GENERATOR.random((rows, 3)).astype(np.float32) * 3
        arrays["z"] = packed if zero == "codes" else floats
        inputs.append("z")
    nodes = [node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **sizes)]
    guest = network(nodes, arrays, (guests.FLOAT, ["n", columns]))
    after = widened(opened(guest, tmp_path))
    assert operators(after) == ["MatMul"]
    x = GENERATOR.standard_normal((4, columns)).astype(np.float32)
    np.testing.assert_allclose(outputs(after, x), run(guest, x), rtol=1e-4, atol=1e-4)


STORED = {
    "int8": ("quantize-weights", {"preset": "int8"}),
    "int4": ("quantize-weights", {"bits": 4, "group": 8, "symmetric": False}),
    "int2": ("quantize-weights", {"bits": 2, "group": 8}),
    "fp8": ("quantize-weights", {"preset": "fp8"}),
    "nvfp4": ("quantize-weights", {"bits": None, "format": "nvfp4"}),
    "tables": ("quantize-weights", {"preset": "int8", "embeddings": True}),
    "cluster": ("cluster", {"bits": 4, "group_rows": 4}),
}


@pytest.mark.parametrize("how", STORED)
def test_weights_that_this_project_stores(tmp_path: Path, how: str) -> None:
    """What is exported computes the same as the floats that are read from it."""
    nodes = [
        node("Gather", ["table.weight", "x"], ["a"]),
        node("MatMul", ["a", "one.weight"], ["b"]),
        node("Gemm", ["b", "two.weight"], ["y"], transB=1),
    ]
    shapes = {"table.weight": (20, 16), "one.weight": (16, 32), "two.weight": (4, 32)}
    arrays = {name: guests.weight(*shape) for name, shape in shapes.items()}
    carrier = opened(network(nodes, arrays, (guests.TensorProto.INT64, ["n"])), tmp_path)
    name, options = STORED[how]
    declared = catalog.load("pass", name).model_validate(options)
    after = declared.apply(carrier, CONTEXT, {}).carrier
    (tmp_path / "out").mkdir()
    exporter = catalog.load("exporter", "onnx")()
    path = exporter.write(after, tmp_path / "out", ExportContext("own", "0" * 64))[0]
    floats = widened(open_onnx(path, OPSET))
    assert not is_quantized(floats.graph())
    assert {layer.weight for layer in floats.layers()} == shapes.keys()
    x = np.arange(20)
    np.testing.assert_allclose(outputs(floats, x), run(path, x), rtol=1e-5, atol=1e-5)


class FakeQuantized(torch.nn.Module):
    """As PyTorch trains it: float weights are rounded whenever they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.register_buffer("scale", self.conv.weight.detach().abs().amax((1, 2, 3)) / 127)
        self.register_buffer("zero", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)
        weight = self.conv.weight
        weight = torch.fake_quantize_per_channel_affine(weight, self.scale, self.zero, 0, -128, 127)
        return torch.relu(torch.nn.functional.conv2d(x, weight, self.conv.bias))


def test_fake_quantization_of_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = FakeQuantized().eval(), torch.from_numpy(IMAGES.clip(-6, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            module, (x,), tmp_path / "guest.onnx", dynamo=False, opset_version=17, input_names=["x"]
        )
    before = opened(tmp_path / "guest.onnx", tmp_path)
    after = widened(before)
    assert operators(after) == ["Conv", "Relu"]
    assert [layer.name for layer in after.layers()] == ["conv"]
    codes = after.weight(after.layers()[0]) / module.scale[:, None, None, None]
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    assert sqnr(module(x).detach().numpy(), outputs(after, x.numpy())) > 35


@pytest.mark.parametrize("name", ["branches", "loop", "scan"])
@pytest.mark.parametrize("how", ["quantize-dynamic", "quantize-static"])
def test_inside_branches_and_bodies(tmp_path: Path, name: str, how: str) -> None:
    sample = getattr(wild_models, name)()
    quantized = wild.applied(wild.opened(sample, tmp_path), how, sample.inputs)
    carrier = open_onnx(wild.exported(quantized, tmp_path / "out"), OPSET)
    after = widened(carrier)
    assert not is_quantized(after.graph())
    assert {layer.name for layer in after.layers()} == sample.layers
    batch = sample.inputs(0)
    (ours, *_), reference = after.runner().run(batch).values(), wild.session(sample.model)
    assert sqnr(reference.run(None, batch)[0], ours) > 32
