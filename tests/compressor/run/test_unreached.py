"""A plan says so where much of a file is weights that no pass touches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from compressor.run.plan import make_plan
from compressor.spec.load import load_spec
from tests.compressor.passes.quantize.guests import network, node, weight

END = node("MatMul", ["h", "w1"], ["y"])
ARRAYS = {"w0": weight(32, 16), "w1": weight(32, 4)}
FUSED = helper.make_node(
    "FusedGemm", ["x", "w0"], ["h"], domain="com.microsoft", transB=1, activation="Relu"
)
LEFT = [
    node("Transpose", ["x"], ["t"], perm=[1, 0]),
    node("MatMul", ["w0", "t"], ["l"]),
    node("Transpose", ["l"], ["h"], perm=[1, 0]),
]
OWN = [node("Transpose", ["w0"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["h"])]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([FUSED], ["com.microsoft.FusedGemm; export the model again without ONNX Runtime's graph"]),
        (LEFT, ["80 % of the model's bytes", "those of MatMul (on its left)"]),
        (OWN, []),  # a layer's, once it is folded
    ],
    ids=["optimized", "left", "folded"],
)
def test_weights_in_no_layer_are_named(
    tmp_path: Path, nodes: list[onnx.NodeProto], said: list[str]
) -> None:
    """The plan listed the other layer alone, and the artifact was as large as the model."""
    ends = ((TensorProto.FLOAT, ["n", width]) for width in (16, 4))
    onnx.save(network([*nodes, END], ARRAYS, *ends), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((8, 16), np.float32))
    (tmp_path / "spec.yaml").write_text(
        "version: 1\nname: a\nmodel: {onnx: m.onnx}\n"
        "data: {evaluation: {npz: d.npz, inputs: {x: x}}}\n"
        "passes: [{pass: fuse}, {pass: quantize-weights, preset: int8}]\n"
        "exports: [{format: onnx}]\noutput: out\n"
    )
    plan = make_plan(load_spec(tmp_path / "spec.yaml"))
    found = [doubt for doubt in plan.doubts if "in no layer" in doubt]
    assert len(found) == bool(said)
    assert all(words in found[0] for words in said)
