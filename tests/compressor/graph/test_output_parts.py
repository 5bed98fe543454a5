"""Outputs that are joined of parts are cut into them; others stay whole."""

import numpy as np
import onnx_ir as ir
import pytest

from compressor.graph.inference import infer_shapes
from compressor.graph.output_parts import WHOLE, cut_parts, output_parts


def parts_of(inputs: str, outputs: str, body: str):
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    model = ir.from_onnx_text(text)
    infer_shapes(model)
    return output_parts(model)


ALL = slice(None)
CENTRES = "boxes = Relu(b) scores = Sigmoid(s)"


def test_boxes_beside_scores_are_parts_whatever_the_number_of_places():
    """As YOLOv8 gives them, with the places last."""
    inputs, outputs = "float[n,4,p] b, float[n,18,p] s", "float[n,22,p] y"
    (found,) = parts_of(inputs, outputs, f"{CENTRES} y = Concat<axis=1>(boxes, scores)")
    assert found == ((ALL, slice(0, 4)), (ALL, slice(4, 22)))


def test_scales_are_no_parts_of_their_own():
    """As YOLOX gives them: boxes, objectness and classes of two scales, then places first."""
    scale = (
        "r{0} = Sigmoid(s{0}) c{0} = Concat<axis=1>(b{0}, r{0}, s{0}) f{0} = Reshape(c{0}, to{0})"
    )
    body = " ".join(
        [
            "to1 = Constant<value_ints=[1,6,16]>() to2 = Constant<value_ints=[1,6,4]>()",
            scale.format(1),
            scale.format(2),
            "f = Concat<axis=2>(f1, f2) y = Transpose<perm=[0,2,1]>(f)",
        ]
    )
    inputs = ", ".join(
        f"float[1,4,{s},{s}] b{i}, float[1,1,{s},{s}] s{i}" for i, s in ((1, 4), (2, 2))
    )
    (found,) = parts_of(inputs, "float[1,20,6] y", body)
    assert [part[2] for part in found] == [slice(0, 4), slice(4, 5), slice(5, 6)]
    assert all(part[:2] == (ALL, ALL) for part in found)
    y = np.arange(120.0).reshape(1, 20, 6)
    assert np.concatenate(cut_parts([y], [found]), 2).tolist() == y.tolist()


@pytest.mark.parametrize(
    ("inputs", "outputs", "body"),
    [
        ("float[n,4] a", "float[n,4] y", "y = Relu(a)"),
        ("float[n,4] a, float[n,4] b", "float[n,8] y", "c = Concat<axis=1>(a, b) y = Relu(c)"),
        ("float[n,1] a, float[n,4] b", "float[n,5] y", "y = Concat<axis=1>(a, b)"),
        ("float[n,4] a, float[m,4] b", "float[k,4] y", "y = Concat<axis=0>(a, b)"),
        ("float[n,2,p] a, float[n,2,q] b", "float[n,2,r] y", "y = Concat<axis=2>(a, b)"),
        ("float[n,2] a", "float[n,40] y", f"y = Concat<axis=1>({', '.join('a' * 20)})"),
    ],
    ids=["computed", "computed later", "one number", "samples", "open length", "many"],
)
def test_others_are_whole(inputs: str, outputs: str, body: str):
    """A sample of one number has no direction; of twenty alike, each says little."""
    assert parts_of(inputs, outputs, body) == (WHOLE,)


def test_each_output_has_its_own():
    outputs = "float[n,4] y, float[n,8] z"
    first, second = parts_of("float[n,4] a", outputs, "y = Relu(a) z = Concat<axis=-1>(a, y)")
    assert first == WHOLE
    assert second == ((ALL, slice(0, 4)), (ALL, slice(4, 8)))
    given = [np.ones((3, 4)), np.ones((3, 8))]
    assert [part.shape for part in cut_parts(given, [first, second])] == [(3, 4)] * 3
