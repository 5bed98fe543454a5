"""Outputs that never change, and numbers of classes, do not count beside others."""

import onnx_ir as ir
import pytest

from compressor.graph.output_parts import compared_outputs

FIXED = "grid = Constant<value_floats=[1.0,2.0]>() n = Shape<start=0,end=1>(x)"
Y = "y = Relu(x)"
OF_X = "float[n,4] x"


@pytest.mark.parametrize(
    ("outputs", "body", "counted"),
    [
        ("float[n,4] y", Y, (True,)),
        ("float[n,4] y, float[2] grid", f"{Y} {FIXED}", (True, False)),
        (
            "float[n,4] y, float[n,2] g",
            f"{Y} {FIXED} two = Constant<value_ints=[2]>() to = Concat<axis=0>(n, two) "
            "g = Expand(grid, to)",
            (True, False),
        ),
        ("int64[n,1] k, float[n,4] y", f"{Y} k = ArgMax<axis=1>(x)", (False, True)),
        ("int64[n,1] k", "k = ArgMax<axis=1>(x)", (True,)),
        ("float[2] grid", FIXED, (True,)),
        ("float[n,4] y, float[n,4] z", f"{Y} {FIXED} f = Cast<to=1>(n) z = Mul(y, f)", (True,) * 2),
    ],
)
def test_outputs_that_say_something_of_a_sample(outputs: str, body: str, counted: object) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({OF_X}) => ({outputs}) {{ {body} }}'
    assert compared_outputs(ir.from_onnx_text(text)) == counted


def test_a_stored_value_is_not_an_input_and_a_branch_reads_values_of_its_own() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n] x, float[1] w) => '
        "(float[1] y, float[n] z) <float[1] w = {1.0}> "
        "{ y = Relu(w) few = Constant<value_ints=[1]>() some = Cast<to=9>(few) "
        "z = If(some) <then_branch = a () => (float[n] p) { p = Relu(x) }, "
        "else_branch = b () => (float[n] q) { q = Abs(x) }> }"
    )
    assert compared_outputs(ir.from_onnx_text(text)) == (False, True)
