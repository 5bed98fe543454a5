"""Group norms, for which ONNX Runtime has no kernel on the CPU, in the form of instance norms."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor.exporters.onnx.forms import in_form_for
from compressor.graph.channels.analysis import map_channels
from compressor.models.onnx import ort_runner
from compressor.models.onnx.carrier import open_onnx
from compressor.models.onnx.ort_runner import runner_of
from compressor.types.tensors import Array

CHANNELS = 8
GENERATOR = np.random.default_rng(0)
FACTORS, TERMS = GENERATOR.standard_normal((2, CHANNELS)).astype(np.float32)


def group_norm(
    groups: int, axes: list[int | str], *, opset: int = 21, dtype: int = TensorProto.FLOAT
) -> ir.Model:
    """Return a group norm, whose output is the model's, and a sum with its input."""
    last = groups if opset < 21 else CHANNELS
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    stored = {"scale": FACTORS[:last].astype(kind), "bias": TERMS[:last].astype(kind)}
    ends = {n: helper.make_tensor_value_info(n, dtype, ["n", CHANNELS, *axes]) for n in "xyz"}
    inputs = ["x", "scale", "bias"]
    nodes = [
        helper.make_node("GroupNormalization", inputs, ["y"], num_groups=groups, epsilon=1e-3),
        helper.make_node("Add", ["x", "y"], ["z"]),
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", [ends["x"]], [ends["y"], ends["z"]], weights)
    opsets = [helper.make_opsetid("", opset)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def expected(x: Array, groups: int, opset: int) -> Array:
    each = CHANNELS // groups
    factors, terms = (np.repeat(a[:groups], each) if opset < 21 else a for a in (FACTORS, TERMS))
    values, weight, bias = (torch.from_numpy(a) for a in (x, factors, terms))
    return np.asarray(torch.group_norm(values, groups, weight, bias, 1e-3))


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("groups", [1, 4, CHANNELS])
@pytest.mark.parametrize("axes", [[], ["t"], [5, 6], ["h", "w"], [2, "h", 3]], ids=str)
def test_it_computes_the_same_by_operators_that_have_kernels(
    groups: int, axes: list[int | str], opset: int, tmp_path: Path
):
    model = group_norm(groups, axes, opset=opset)
    formed = in_form_for("ort-cpu", model, "float32")
    operators = Counter(node.op_type for node in formed.graph)
    assert operators["InstanceNormalization"] == 1
    assert not operators["GroupNormalization"]
    ir.save(formed, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    lengths = [a if isinstance(a, int) else 4 + i for i, a in enumerate(axes)]
    x = (3 + GENERATOR.standard_normal((2, CHANNELS, *lengths))).astype(np.float32)
    wanted = expected(x, groups, opset)
    in_memory = runner_of(model, ()).run({"x": x})
    for y, z in (session.run(["y", "z"], {"x": x}), (in_memory["y"], in_memory["z"])):
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(z, wanted + x, rtol=1e-4, atol=1e-5)


def test_the_float_model_is_timed_in_the_same_form(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ort_runner, "OrtRunner", lambda content, **_: content)
    content = ort_runner.graph_runner(group_norm(4, [5, 6]))
    assert b"InstanceNormalization" in content
    assert b"GroupNormalization" not in content


@pytest.mark.parametrize("target", ["ort-cuda", "openvino", "tensorrt"])
def test_other_targets_get_it_as_it_is(target: str):
    model = group_norm(4, [5, 6])
    assert in_form_for(target, model, "float32") is model


def test_halves_stay_since_instance_norms_of_them_have_no_kernel():
    model = group_norm(4, [5, 6], dtype=TensorProto.FLOAT16)
    assert in_form_for("ort-cpu", model, "float32") is model


def test_norms_that_share_equal_constants_do_not_tie_their_channels(tmp_path: Path):
    """Exporters store equal constants once; all layers in front of norms were one group."""
    convolutions = [
        helper.make_node("Conv", [x, f"{y}.weight"], [y], pads=[1] * 4)
        for x, y in (("x", "a"), ("n_a", "b"), ("n_b", "y"))
    ]
    norms = [
        helper.make_node("InstanceNormalization", [x, "ones", "zeros"], [f"n_{x}"]) for x in "ab"
    ]
    weights = {f"{n}.weight": GENERATOR.standard_normal((6, 6, 3, 3)) for n in "aby"}
    stored = weights | {"ones": np.ones(6), "zeros": np.zeros(6)}
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 6, 8, 8]) for n in "xy"]
    nodes = [convolutions[0], norms[0], convolutions[1], norms[1], convolutions[2]]
    given = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in stored.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], given)
    opsets = [helper.make_opsetid("", 21)]
    ir.save(
        ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10)),
        tmp_path / "m.onnx",
    )
    channels = map_channels(open_onnx(tmp_path / "m.onnx", 21).graph())
    assert [len(group.units) for group in channels.groups if not group.frozen] == [6, 6]
