"""Compares the torch graph executor with ONNX Runtime on small models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper, numpy_helper

from compressor.models.executor import GraphModule

Arrays = dict[str, np.ndarray[Any, Any]]

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
"""Where each case runs."""

OPSET = 21
CONTRIB = "com.microsoft"


def make_model(nodes: list[onnx.NodeProto], inputs: Arrays, weights: Arrays) -> onnx.ModelProto:
    """Make a model whose outputs are those of the last node."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in nodes[-1].output if name],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def by_runtime(model: onnx.ModelProto, inputs: Arrays) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, inputs))


def assert_same(
    model: onnx.ModelProto, inputs: Arrays, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    expected = by_runtime(model, inputs)
    for device in DEVICES:
        module = GraphModule(ir.from_proto(model)).to(device)
        given = {name: torch.from_numpy(value).to(device) for name, value in inputs.items()}
        results = module(**given)
        assert len(results) == len(expected)
        for result, value in zip(results.values(), expected, strict=True):
            torch.testing.assert_close(result.cpu(), torch.from_numpy(value), rtol=rtol, atol=atol)


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_node_same(
    op: str, inputs: Arrays, attributes: Mapping[str, Any], outputs: int = 1, domain: str = ""
) -> None:
    names = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, list(inputs), names, domain=domain, **attributes)
    assert_same(make_model([node], inputs, {}), inputs)
