"""Files in float64, and weights of 16 bits that are read as float32, are compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import SpecError
from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.quantize.cast.cast import Cast
from compressor.passes.quantize.dynamic import QuantizeDynamic
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.quantize.weights.weights import QuantizeWeights
from compressor.passes.train.qat.qat import Qat
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from compressor.types.tensors import TensorSpec
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import IMAGES, network, node, run, sqnr, weight
from tests.compressor.passes.quantize.test_dequantize import opened
from tests.compressor.passes.quantize.test_halves import CONTEXT, HALVES, exported
from tests.compressor.passes.quantize.test_quantized_again import applied

ROW = np.random.default_rng(2).standard_normal((8, 16))


def double(mask: float = 0.0) -> onnx.ModelProto:
    """Two layers in float64, the second behind a mask that may be beyond float32."""
    nodes = [
        node("MatMul", ["x", "w0"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "w1"], ["s"]),
        node("Add", ["s", "mask"], ["m"]),
        node("Softmax", ["m"], ["y"]),
    ]
    arrays = {"w0": weight(16, 32).astype("f8"), "w1": weight(32, 10).astype("f8")}
    arrays["mask"] = np.array([0.0] * 9 + [mask])
    ends = ((TensorProto.DOUBLE, ["n", width]) for width in (16, 10))
    return network(nodes, arrays, *ends)


@pytest.mark.parametrize("mask", [0.0, -1e300, -np.inf])
def test_cast_makes_a_file_of_float64_compute_in_float32(tmp_path: Path, mask: float) -> None:
    """The pass refused it: its weight is float64 already."""
    carrier = opened(double(mask), tmp_path)
    after = applied(carrier, Cast(dtype="fp32"), CONTEXT, ROW)
    assert {layer.dtype for layer in after.layers()} == {"float32"}
    result = exported(after, tmp_path / "out").run({"x": ROW})["y"]
    assert result.dtype == np.float64  # inputs and outputs keep their type
    assert sqnr(run(double(mask), ROW), result) > 100


def test_a_few_numbers_in_float64_stay_so(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
        node("Mul", ["d", "k"], ["e"]),
        node("Cast", ["e"], ["f"], to=TensorProto.FLOAT),
        node("MatMul", ["f", "w"], ["y"]),
    ]
    arrays = {"k": np.array(1 / 3), "w": weight(16, 4).astype("f2")}
    nodes.insert(3, node("Cast", ["w"], ["g"], to=TensorProto.FLOAT))
    nodes[4].input[1] = "g"
    model = network(nodes, arrays, (TensorProto.FLOAT, ["n", 16]), (TensorProto.FLOAT, ["n", 4]))
    row = ROW.astype(np.float32)
    after = applied(opened(model, tmp_path), Cast(dtype="fp32"), CONTEXT, row)
    assert [n.outputs[0].dtype for n in after.graph().graph][:2] == [TensorProto.DOUBLE] * 2


def test_a_refusal_names_the_pass(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="float64") as error:
        Cast().survey(opened(double(), tmp_path), CONTEXT)
    assert "put {pass: cast, dtype: fp32} before it" in error.value.remedy


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_qat_asks_for_a_module_of_float32(dtype: str) -> None:
    """A cast before it, which was the remedy, leaves a graph that is not trained."""
    kind = getattr(torch, dtype)
    carrier = TorchCarrier(torch.nn.Linear(4, 2).to(kind), [TensorSpec("input", ("n", 4), dtype)])
    with pytest.raises(SpecError, match=f"the module computes in {dtype}") as error:
        Qat(loss="mse").survey(carrier, CONTEXT)
    assert "as by module.float()" in error.value.remedy


def test_init_writes_it(tmp_path: Path) -> None:
    """The spec had fuse alone, for a model without weights to quantize."""
    onnx.save(double(), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.concatenate([ROW] * 20))
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml", Choices(tmp_path / "data.npz"))
    assert "layers in float64" in (tmp_path / "spec.yaml").read_text()
    plan = make_plan(load_spec(tmp_path / "spec.yaml"))
    assert [p.name for p in plan.passes] == ["cast", "fuse", "quantize-static"]
    assert all(row.actions[-1].startswith("int8") for row in plan.rows)


def stored(model: onnx.ModelProto, half: str) -> onnx.ModelProto:
    """Return a model whose weights are stored in 16 bits, each with a ``Cast`` behind it."""
    kind, dtype = HALVES[half]
    graph = model.graph
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim < 2 or array.dtype != np.float32:
            continue
        name = tensor.name
        raw = array.astype(dtype).tobytes()
        tensor.CopyFrom(helper.make_tensor(f"{name}_half", kind, array.shape, raw, raw=True))
        graph.node.insert(0, node("Cast", [f"{name}_half"], [name], to=TensorProto.FLOAT))
    return model


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "declared",
    [QuantizeStatic(), QuantizeDynamic(convolutions=True), QuantizeWeights(bits=8)],
    ids=lambda declared: declared.name,
)
def test_weights_behind_a_cast_are_quantized(tmp_path: Path, half: str, declared: Any) -> None:
    """quantize-static left them out: their weights are computed. bfloat16 had no scale."""
    model = stored(guests.convolutional(), half)
    carrier = opened(model, tmp_path)
    after = applied(declared.adapted(carrier, CONTEXT), declared, CONTEXT, IMAGES)
    assert {layer.dtype for layer in after.layers()} == {"int8"}
    result = exported(after, tmp_path / "out").run({"x": IMAGES})["y"]
    assert sqnr(run(guests.convolutional(), IMAGES), result) > 32
