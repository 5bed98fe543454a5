"""Parameters, bytes and multiply-accumulates, against numbers that are known."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.graph.channels.analysis import map_channels
from compressor.graph.costs import batch_macs, initializer_bytes, macs, parameters, turn_notes
from compressor.graph.inference import infer_shapes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.run.anatomy import layer_graph
from compressor.types.tensors import TensorSpec
from tests.compressor.exporters.hand_made import sample
from tests.compressor.tiny_project import tiny_onnx


def test_resnet20():
    """He et al. 2015, table 6: 0.27 M parameters."""
    carrier = sample("resnet20")
    assert parameters(carrier.graph()) == 269_722
    # Convolutions at 32x32, 16x16 and 8x8, the two strided ones, and the classifier.
    wanted = 1024 * 27 * 16 + 6 * 1024 * 144 * 16
    wanted += 256 * 144 * 32 + 5 * 256 * 288 * 32 + 64 * 288 * 64 + 5 * 64 * 576 * 64 + 640
    assert macs(carrier.graph()) == wanted == 40_551_040


def test_digits():
    carrier = sample("digits")
    own = sum(p.numel() for p in carrier.module.parameters())
    assert parameters(carrier.graph()) == own == 110_810
    assert macs(carrier.graph()) == 3_763_840


def graph(
    nodes: list[onnx.NodeProto],
    shape: list[int | str],
    weights: dict[str, np.ndarray],
    output: list[int | str],
) -> ir.Model:
    """Make a model from ``x`` to ``y``, its shapes inferred."""
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


@pytest.mark.parametrize("shape", [(1, 3, 8, 16), (5, 3, 8, 16), (2, 3, 20, 12)])
def test_work_of_a_batch_is_that_of_its_lengths(shape: tuple[int, ...]) -> None:
    """A stride of four leaves a sixteenth of the places, not as many as there are pixels."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], strides=[4, 4], kernel_shape=[4, 4])
    axes = ["n", 3, "height", "width"]
    model = graph([node], axes, {"w": floats(6, 3, 4, 4)}, ["n", 6, "h", "w"])
    spec = TensorSpec("x", tuple(axes), "float32")
    carrier = SimpleNamespace(inputs=(spec,), graph=lambda: model)
    count, _, height, width = shape
    wanted = count * (height // 4) * (width // 4) * 6 * 3 * 4 * 4
    assert batch_macs(carrier, {"x": np.zeros(shape, np.float32)}) == wanted


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("node", "shape", "weight", "output", "expected"),
    [
        (
            helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2]),
            ["n", 4, 9, 9],
            floats(6, 4, 3, 3),
            ["n", 6, 4, 4],
            16 * 6 * 36,
        ),
        (
            helper.make_node("Conv", ["x", "w"], ["y"], group=4),
            ["n", 4, 5, 5],
            floats(8, 1, 3, 3),
            ["n", 8, 3, 3],
            9 * 8 * 9,
        ),
        (
            helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], group=2),
            ["n", 4, 5, 5],
            floats(4, 3, 2, 2),
            ["n", 6, 10, 10],
            25 * 4 * 3 * 4,
        ),
        (
            helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
            ["n", 5],
            floats(3, 5),
            ["n", 3],
            15,
        ),
        (helper.make_node("Gemm", ["x", "w"], ["y"]), ["n", 5], floats(5, 3), ["n", 3], 15),
        (
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            ["n", 7, 5],
            floats(5, 3),
            ["n", 7, 3],
            7 * 15,
        ),
        (helper.make_node("MatMul", ["x", "x"], ["y"]), [2, 5, 5], floats(1), [2, 5, 5], 2 * 125),
        (helper.make_node("Add", ["x", "w"], ["y"]), ["n", 5], floats(5), ["n", 5], 0),
    ],
)
def test_macs_of_one_operator(
    node: onnx.NodeProto,
    shape: list[int | str],
    weight: np.ndarray,
    output: list[int | str],
    expected: int,
):
    model = graph([node], shape, {"w": weight}, output)
    assert macs(model) == expected
    assert parameters(model) == weight.size


def test_a_weight_that_is_used_twice_is_computed_twice_and_stored_once():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    model = graph(nodes, ["n", 5], {"w": floats(5, 5)}, ["n", 5])
    assert (macs(model), parameters(model), initializer_bytes(model)) == (50, 25, 100)


def quantized(dtype: type, per_byte: int) -> ir.Model:
    """Make a linear layer with integer codes, scales and zero points."""
    model = graph(
        [
            helper.make_node("DequantizeLinear", ["w", "s", "z"], ["f"], axis=0),
            helper.make_node("Gemm", ["x", "f", "b"], ["y"], transB=1),
        ],
        ["n", 8],
        {
            "w": np.ones((4, 8), np.int8),
            "s": floats(4),
            "z": np.zeros(4, np.int8),
            "b": floats(4),
        },
        ["n", 4],
    )
    for name in ("w", "z"):
        value = model.graph.initializers[name]
        array = np.asarray(value.const_value.numpy()).astype(dtype)  # type: ignore[union-attr]
        value.const_value = ir.tensor(array, name=name)
        value.dtype = value.const_value.dtype
    assert initializer_bytes(model) == (32 + 4) // per_byte + 16 + 16
    return model


@pytest.mark.parametrize(("dtype", "per_byte"), [(np.int8, 1), (ml_dtypes.int4, 2)])
def test_codes_are_parameters_and_their_scales_are_not(dtype: type, per_byte: int):
    model = quantized(dtype, per_byte)
    assert parameters(model) == 32 + 4
    assert macs(model) == 32


def test_shapes_single_numbers_and_running_statistics_are_not_parameters():
    nodes = [
        helper.make_node("BatchNormalization", ["x", "w", "b", "mean", "var"], ["a"]),
        helper.make_node("Mul", ["a", "two"], ["c"]),
        helper.make_node("Reshape", ["c", "shape"], ["y"]),
    ]
    weights = {
        "w": floats(3),
        "b": floats(3),
        "mean": floats(3),
        "var": floats(3),
        "two": np.float32(2).reshape(()),
        "shape": np.array([-1]),
    }
    model = graph(nodes, ["n", 3], weights, ["m"])
    assert parameters(model) == 6
    assert initializer_bytes(model) == 4 * 13 + 8


def test_unknown_shapes_cost_nothing_rather_than_a_guess():
    nodes = [
        helper.make_node("Foreign", ["x"], ["a"], domain="somebody.else"),
        helper.make_node("MatMul", ["a", "a"], ["y"]),
    ]
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("somebody.else", 1)]
    model = ir.from_proto(helper.make_model(made, opset_imports=opsets))
    assert macs(model) == 0


def test_tiny():
    model = ir.from_proto(tiny_onnx())
    infer_shapes(model)
    assert (parameters(model), initializer_bytes(model)) == (700, 2800)
    assert macs(model) == 64 * (72 + 576) + 32


ROWS = [
    # five rows a sample, in both products
    (["N", 5, 8], None, (-1, 8), ["N", 5, 8], 2 * 5 * 8 * 8),
    (["N", 8, 1], None, (-1, 8), ["N", 8], 2 * 8 * 8),  # a flattened sample is one row
    ([3, 5, 8], None, (-1, 8), [3, 5, 8], 2 * 15 * 8 * 8),  # the number of rows is known
    # tokens before samples, and heads joined
    (["N", 2, 5, 4], (2, 0, 1, 3), (-1, 8), [5, "N", 8], 2 * 5 * 8 * 8),
    # 15 windows a sample, of four rows
    (["N", 3, 4, 5, 8], (0, 1, 3, 2, 4), (-1, 4, 8), ["N", 3, 5, 4, 8], 2 * 60 * 8 * 8),
]


@pytest.mark.parametrize(("shape", "order", "view", "output", "expected"), ROWS)
def test_macs_of_rows_of_a_view(
    shape: list[int | str],
    order: tuple[int, ...] | None,
    view: tuple[int, ...],
    output: list[int | str],
    expected: int,
) -> None:
    """A product of ``[12*batch, channels]``, or of windows, counted as that of one row or window.

    What knows each node, such as the channels that are pruned, counts as all do.
    """
    back = np.array([-1 if isinstance(d, str) else d for d in output])
    weights = {"w": floats(8, 8), "to": np.array(view), "back": back}
    model = graph(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=order or range(len(shape))),
            helper.make_node("Reshape", ["t", "to"], ["m"]),
            helper.make_node("MatMul", ["m", "w"], ["p"], name="first"),
            helper.make_node("Relu", ["p"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["q"], name="second"),
            helper.make_node("Reshape", ["q", "back"], ["y"]),
        ],
        shape,
        weights,
        output,
    )
    layers = layer_graph(OnnxCarrier(model), {})
    assert layers is not None
    assert macs(model) == sum(layer["macs"] for layer in layers["layers"]) == expected
    assert sum(product.macs for product in map_channels(model).products) == expected


def test_macs_of_open_windows() -> None:
    """A window that is longer than a sample of one pixel counts once, as before."""
    weights = {"w": floats(4, 3, 3, 3), "to": np.array([-1, 4])}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Reshape", ["c", "to"], ["y"]),
    ]
    model = graph(nodes, ["N", 3, "H", "W"], weights, ["rows", 4])
    assert macs(model) == 108


def looped(count: str, first: str, last: str) -> ir.Model:
    """Return a loop of three turns at most, whose body multiplies by a matrix."""
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n,8] x, float[8,8] w, int64 asked, '
        "bool flag) => (float[n,8] y) { three = Constant<value = int64 {3}>() "
        "yes = Constant<value = bool {1}>() no = Constant<value = bool {0}>() "
        f"y = Loop({count}, {first}, x) <body = b (int64 i, bool on, float[n,8] h) => "
        f"(bool next, float[n,8] z) {{ next = Identity({last}) z = MatMul(h, w) }}> }}"
    )
    infer_shapes(model)
    return model


@pytest.mark.parametrize(
    ("count", "first", "last", "turns", "known"),
    [
        ("three", '""', "on", 3, True),
        ("three", "yes", "on", 3, True),
        ("three", "yes", "yes", 3, True),
        ("asked", "yes", "yes", 1, False),
        ("three", "flag", "yes", 1, False),
        ("three", "yes", "flag", 1, False),
        ("three", "no", "on", 1, False),
    ],
)
def test_the_body_of_a_loop_counts_as_often_as_it_is_computed(
    count: str, first: str, last: str, turns: int, known: bool
):
    model = looped(count, first, last)
    assert macs(model) == turns * 64
    notes = turn_notes(model)
    assert bool(notes) != known
    assert known or "count once: values decide how many turns it takes" in notes[0]


def test_a_scan_counts_each_step():
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[4,4] s, float[4,4] w, float[5,4,4] x) '
        "=> (float[4,4] t, float[5,4,4] y) { t, y = Scan<num_scan_inputs=1, "
        "body = b (float[4,4] h, float[4,4] e) => (float[4,4] k, float[4,4] z) "
        "{ k = Add(h, e) z = MatMul(e, w) }>(s, x) }"
    )
    infer_shapes(model)
    assert macs(model) == 5 * 4 * 4 * 4
    assert not turn_notes(model)
