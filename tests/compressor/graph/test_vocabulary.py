"""Inputs that pick rows of a table, and data that pick rows which are not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from compressor import catalog
from compressor.errors import DataError
from compressor.graph.layers import index_limits
from compressor.run.data import Data, check_data
from compressor.types.tensors import TensorSpec

IDS = TensorSpec("ids", ("batch", 3), "int64")


def model(body: str) -> ir.Model:
    graph = ir.from_onnx_text(
        f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (int64[batch, 3] ids, float[batch, 2] x) => (float[batch, 3, 2] y) {{ {body} }}
        """
    )
    for name, rows in (("table", 7), ("small", 5)):
        tensor = ir.tensor(np.zeros((rows, 2), np.float32), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.FLOAT))
        value.const_value = tensor
        for node in graph.graph:
            for index, entry in enumerate(node.inputs):
                if entry is not None and entry.name == name:
                    node.replace_input_with(index, value)
        if value.uses():
            graph.graph.register_initializer(value)
    return graph


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        ("y = Gather (table, ids)", {"ids": 7}),
        ("i = Cast <to = 6> (ids) j = Identity (i) y = Gather <axis = 0> (table, j)", {"ids": 7}),
        ("a = Gather (table, ids) b = Gather (small, ids) y = Add (a, b)", {"ids": 5}),
        # Arithmetic may bring any index into range.
        ("i = Mod (ids, ids) y = Gather (table, i)", {}),
        ("t = Transpose (table) a = Gather <axis = 1> (t, ids) y = Transpose (a)", {}),
    ],
)
def test_limits_of_a_graph(body: str, limits: dict[str, int]) -> None:
    assert index_limits(model(body)) == limits


@pytest.mark.parametrize(("worst", "fits"), [(6, True), (7, False), (-7, True), (-8, False)])
def test_the_first_sample_is_compared_with_them(tmp_path: Path, worst: int, fits: bool) -> None:
    path = tmp_path / "ids.npz"
    np.savez(path, ids=np.array([[0, worst, 1], [0, 0, 0]], np.int64))
    source = catalog.load("source", "npz")(path=path)
    data = Data("evaluation", source, None, 2, "", "spec.yaml:5")
    if fits:
        check_data(data, [IDS], {"ids": 7})
        return
    message = f"spec.yaml:5: evaluation data, input 'ids': holds {worst}, and .* has 7 rows"
    with pytest.raises(DataError, match=message):
        check_data(data, [IDS], {"ids": 7})
