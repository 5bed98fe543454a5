"""Which nodes are layers, and how their weights are stored."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.graph.layers import graph_layers
from compressor.graph.plain import clean
from compressor.graph.stored_weights import side_tensors, weight_source
from compressor.graph.values import (
    all_nodes,
    constant_array,
    dims,
    is_op,
    static_shape,
    tensor_spec,
    value_by_name,
)

node = helper.make_node


def model_of(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], output: str = "y"
) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("somebody.else", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_a_layer_s_facts():
    model = model_of(
        [node("Gemm", ["x", "fc.weight", "fc.bias"], ["y"], transB=1)],
        {"fc.weight": floats(3, 4), "fc.bias": floats(3)},
    )
    (layer,) = graph_layers(model)
    assert (layer.name, layer.kind, layer.weight, layer.bias) == (
        "fc",
        "Gemm",
        "fc.weight",
        "fc.bias",
    )
    assert (layer.shape, layer.dtype, layer.transposed) == ((3, 4), "float32", False)
    assert (layer.inputs, layer.output) == (("x", "fc.bias"), "y")


@pytest.mark.parametrize(
    ("nodes", "shape", "transposed"),
    [
        ([node("Gemm", ["x", "w"], ["y"], transB=1)], (3, 4), False),
        ([node("Gemm", ["x", "w"], ["y"])], (4, 3), True),
        ([node("MatMul", ["x", "w"], ["y"])], (4, 3), True),
        (
            [
                node("Transpose", ["w"], ["t"], perm=[1, 0]),
                node("MatMul", ["x", "t"], ["y"]),
            ],
            (3, 4),
            False,
        ),
        (
            [node("Transpose", ["w"], ["t"]), node("Gemm", ["x", "t"], ["y"], transB=1)],
            (4, 3),
            True,
        ),
        (
            [
                node("Transpose", ["w"], ["s"]),
                node("Transpose", ["s"], ["t"]),
                node("MatMul", ["x", "t"], ["y"]),
            ],
            (4, 3),
            True,
        ),
    ],
)
def test_rows_are_output_channels_however_the_weight_is_read(
    nodes: list[onnx.NodeProto], shape: tuple[int, int], transposed: bool
):
    (layer,) = graph_layers(model_of(nodes, {"w": floats(*shape)}))
    assert layer.transposed is transposed
    assert (layer.rows, layer.columns) == (3, 4)


def test_a_weight_is_found_behind_codes_and_casts():
    model = model_of(
        [
            node("DequantizeLinear", ["w", "scale", "zero"], ["d"], axis=0),
            node("Cast", ["d"], ["c"], to=TensorProto.FLOAT),
            node("Transpose", ["c"], ["t"]),
            node("MatMul", ["x", "t"], ["y"]),
        ],
        {"w": np.ones((3, 4), np.int8), "scale": floats(3), "zero": np.zeros(3, np.int8)},
    )
    (layer,) = graph_layers(model)
    assert (layer.name, layer.dtype, layer.transposed) == ("w", "int8", False)
    assert side_tensors(model.graph.initializers["w"]) == ["scale", "zero"]


@pytest.mark.parametrize(
    ("nodes", "weights"),
    [
        ([node("MatMul", ["x", "x"], ["y"])], {}),
        ([node("Add", ["x", "w"], ["y"])], {"w": floats(4)}),
        ([node("MatMul", ["x", "w"], ["y"])], {"w": floats(4)}),
        ([node("MatMul", ["x", "w"], ["y"])], {"w": floats(2, 4, 3)}),
        ([node("Gather", ["w", "x"], ["y"])], {"w": np.arange(4)}),
        ([node("MatMul", ["x", "w"], ["y"], domain="somebody.else")], {"w": floats(4, 3)}),
        ([node("Relu", ["w"], ["r"]), node("MatMul", ["x", "r"], ["y"])], {"w": floats(4, 3)}),
    ],
    ids=["activations", "addition", "vector", "batched", "integers", "foreign", "computed"],
)
def test_what_is_no_layer(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]):
    assert graph_layers(model_of(nodes, weights)) == ()


def test_a_shared_weight_is_one_layer():
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    (layer,) = graph_layers(model_of(nodes, {"w": floats(4, 4)}))
    assert (layer.inputs, layer.output) == (("x",), "a")


def test_layers_come_in_the_order_of_execution():
    nodes = [
        node("MatMul", ["x", "z"], ["a"]),
        node("MatMul", ["a", "b"], ["c"]),
        node("MatMul", ["c", "k"], ["y"]),
    ]
    model = model_of(nodes, {n: floats(4, 4) for n in "bkz"})
    assert [layer.name for layer in graph_layers(model)] == ["z", "b", "k"]


def test_a_weight_that_is_computed_from_an_input_has_no_source():
    model = model_of([node("Transpose", ["x"], ["t"]), node("MatMul", ["x", "t"], ["y"])], {})
    assert weight_source(value_by_name(model)["t"]) == (None, True)
    assert weight_source(None) == (None, False)


def cleaned(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray]) -> ir.Model:
    model = model_of(nodes, weights)
    clean(model)
    return model


def ops(model: ir.Model) -> list[str]:
    return [n.op_type for n in all_nodes(model.graph)]


def test_cleaning_keeps_parameters_and_drops_the_rest():
    model = cleaned(
        [
            node("Shape", ["w"], ["s"]),
            node("Gather", ["s", "one"], ["last"]),
            node("Concat", ["minus", "last"], ["shape"], axis=0),
            node("Identity", ["x"], ["same"]),
            node("MatMul", ["same", "w"], ["m"]),
            node("Reshape", ["m", "shape"], ["y"]),
            node("MatMul", ["x", "unused"], ["dead"]),
        ],
        {
            "w": floats(4, 3),
            "one": np.array([1]),
            "minus": np.array([-1]),
            "unused": floats(4, 4),
        },
    )
    assert ops(model) == ["MatMul", "Reshape"]
    assert set(model.graph.initializers) >= {"w"}
    assert "unused" not in model.graph.initializers
    (layer,) = graph_layers(model)
    assert (layer.name, layer.inputs) == ("w", ("x",))
    reshape = next(n for n in all_nodes(model.graph) if is_op(n, "Reshape"))
    assert constant_array(reshape.inputs[1]).tolist() == [-1, 3]  # type: ignore[union-attr]


def test_cleaning_does_not_fold_what_reads_a_parameter():
    """The transposed weight would be a new tensor, under a name that no checkpoint has."""
    nodes = [node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])]
    model = cleaned(nodes, {"w": floats(3, 4)})
    assert ops(model) == ["Transpose", "MatMul"]
    assert graph_layers(model)[0].name == "w"


def test_cleaning_makes_constants_initializers():
    value = numpy_helper.from_array(floats(4, 3), "inner")
    nodes = [node("Constant", [], ["w"], value=value), node("MatMul", ["x", "w"], ["y"])]
    model = cleaned(nodes, {})
    assert ops(model) == ["MatMul"]
    assert graph_layers(model)[0].shape == (4, 3)


def test_questions_about_values():
    model = model_of([node("Relu", ["x"], ["y"])], {"w": floats(2, 3)})
    values = value_by_name(model)
    assert list(values) == ["x", "w", "y"]
    assert (dims(values["x"]), dims(values["x"], 7), static_shape(values["x"])) == (
        (1, 4),
        (7, 4),
        None,
    )
    assert static_shape(values["w"]) == (2, 3)
    assert dims(values["y"]) is None
    assert str(tensor_spec(values["x"])) == "x float32[n, 4]"
    assert constant_array(values["x"]) is None
    assert constant_array(None) is None
    np.testing.assert_array_equal(constant_array(values["w"]), floats(2, 3))


def test_what_the_library_cannot_compute_ahead_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # As in a BERT of a fixed length, which takes token types from a table of all positions; onnx's
    # evaluator takes no more than 32.
    table, places = np.arange(64).reshape(1, 64), np.zeros((1, 40), np.int64)
    model = model_of(
        [
            node("GatherElements", ["table", "places"], ["types"], axis=1),
            node("Cast", ["types"], ["kinds"], to=TensorProto.FLOAT),
            node("ReduceSum", ["kinds"], ["sum"], keepdims=0),
            node("Add", ["x", "sum"], ["y"]),
        ],
        {"table": table, "places": places},
    )
    clean(model)
    assert caplog.records == []
    assert is_op(next(iter(model.graph)), "GatherElements")
