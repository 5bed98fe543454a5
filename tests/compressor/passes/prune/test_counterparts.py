"""Values of a pruned model are found in the whole one, whatever the exporter has named them."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from compressor.passes.prune.structured.counterparts import named_alike

WHOLE = """
<ir_version: 10, opset_import: ["": 21]>
g (float[n, 4] x) => (float[n, 2] y)
<float[4, 3] w = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
 float[3, 2] v = {1, 1, 1, 1, 1, 1}, float[1] val_0 = {1}>
{ val_1 = MatMul(x, w)  val_2 = Mul(val_1, val_0)  y = MatMul(val_2, v) }
"""
# A constant is numbered later, as one of the whole model's values is.
SMALLER = """
<ir_version: 10, opset_import: ["": 21]>
g (float[n, 4] x) => (float[n, 2] y)
<float[4, 2] w = {1, 1, 1, 1, 1, 1, 1, 1}, float[2, 2] v = {1, 1, 1, 1},
 float[1] val_1 = {1}>
{ val_0 = MatMul(x, w)  val_2 = Mul(val_0, val_1)  y = MatMul(val_2, v) }
"""


def graph(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def test_values_get_the_names_of_the_whole_model() -> None:
    smaller = graph(SMALLER)
    renamed = named_alike(smaller, graph(WHOLE))
    assert renamed is not None
    assert [n.outputs[0].name for n in renamed.graph] == ["val_1", "val_2", "y"]
    assert {*renamed.graph.initializers} == {"w", "v", "constant.val_1"}
    assert [n.outputs[0].name for n in smaller.graph] == ["val_0", "val_2", "y"]
    onnx.checker.check_model(ir.to_proto(renamed))
    scale = renamed.graph.node(1).inputs
    assert [value.name for value in scale if value is not None] == ["val_1", "constant.val_1"]


def test_values_of_names_that_the_whole_model_lacks_get_its_own() -> None:
    later = SMALLER.replace("val_0", "val_7").replace("val_1", "one").replace("val_2", "val_9")
    renamed = named_alike(graph(later), graph(WHOLE))
    assert renamed is not None
    assert [n.outputs[0].name for n in renamed.graph] == ["val_1", "val_2", "y"]


def test_models_with_the_same_names_stay_as_they_are() -> None:
    whole = graph(WHOLE)
    assert named_alike(whole, graph(WHOLE)) is whole


def test_other_operators_have_no_counterparts() -> None:
    assert named_alike(graph(SMALLER.replace("Mul(", "Add(")), graph(WHOLE)) is None
