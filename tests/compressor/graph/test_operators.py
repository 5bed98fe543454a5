"""One row an operator: what a new activation needs, and how far names of operators are spread."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from compressor.exporters.tensorrt.engine_layers import quantized_layers
from compressor.graph import operators
from compressor.graph.channels.analysis import map_channels
from compressor.graph.costs import Traffic, node_traffic
from compressor.graph.operators import OPERATORS, OTHER, Operator, names, operator, operator_named
from compressor.passes.quantize.cast.islands import FloatIslands
from compressor.passes.quantize.static.placement import PROFILES
from compressor.passes.train.early_exit.points import Batches, Exit, find_answer, find_points
from tests.compressor.graph.channels.channel_graphs import graph, image_net

ROOT = Path(__file__).parents[3] / "compressor"
# One place: each operator is written there once, for PyTorch, LiteRT and exported programs.
KERNELS = ("models/executor", "exporters/litert", "exporters/torch_program")
# One place too: each rule of fusion matches a pattern of named operators.
RULES = "passes/fuse"
MOST = 4
# Calls that make a node; its operator is one of the first arguments.
BUILDERS = {"node", "_node", "Node", "make_node", "add", "_add", "put", "replace", "insert"}
# Words of other tongues: TensorRT's names of kernels, PyTorch's of classes, the title of a tile.
OTHER_WORDS = {
    "exporters/gguf/vocabulary.py",
    "exporters/tensorrt/engine_layers.py",
    "lab/inspect/openvino.py",
    "models/transformers/pooling.py",
    "report/html.py",
}


def spelled(path: Path) -> Iterator[str]:
    """Yield the operators that a file names, apart from those of the nodes that it makes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            made.update(id(a) for a in node.args[:3] if called in BUILDERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in made and node.value in OPERATORS:
            yield str(node.value)


def test_the_name_of_an_operator_is_in_few_files():
    places: dict[str, set[str]] = defaultdict(set)
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for name in spelled(path) if place not in OTHER_WORDS else ():
            where = "kernels" if place.startswith(KERNELS) else place
            places[name].add(RULES if place.startswith(RULES) else where)
    assert not {name: sorted(files) for name, files in places.items() if len(files) > MOST}


def test_rows_are_of_operators_that_exist():
    schemas = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    ours = {name for name, row in OPERATORS.items() if not row.domain}
    # ONNX Runtime knows these two in ONNX's own domain; no schema of ours does.
    assert ours - schemas <= {"SimplifiedLayerNormalization", "Swish"}
    assert all(name == row.name for name, row in OPERATORS.items())


def test_a_row_belongs_to_its_domain():
    value = ir.Value(name="x")
    assert operator(ir.node("Relu", [value])).rectifies
    assert operator(ir.node("Relu", [value], domain="ai.onnx")).rectifies
    assert operator(ir.node("Relu", [value], domain="com.microsoft")) is OTHER
    assert operator(ir.node("MatMulNBits", [value])) is OTHER
    assert operator(ir.node("MatMulNBits", [value], domain="com.microsoft")).packed
    assert operator(None) is operator_named("Unheard") is OTHER
    products = ("MatMul", "MatMulInteger", "MatMulIntegerToFloat")
    assert names(lambda row: row.layer == "MatMul") == products


def test_what_quantizes_and_what_decodes():
    assert names(lambda row: row.quantizes) == ("QuantizeLinear",)
    assert names(lambda row: row.dequantizes) == ("DequantizeLinear",)
    assert names(lambda row: row.decodes) == ("Cast", "Sub", "Mul", "Reshape")


NEW = Operator(
    "Softsign",
    "unary",
    activation=True,
    fused=True,
    float16="cheap",
    between_codes=True,
    kernels=dict.fromkeys(PROFILES, "absorbed"),
)
LINE = "z = Softsign(h)"


@pytest.fixture(params=[False, True])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test without a row for an activation, and with one that it did not have before."""
    rows = {name: row for name, row in OPERATORS.items() if name != NEW.name}
    if request.param:
        rows[NEW.name] = NEW
    monkeypatch.setattr(operators, "OPERATORS", rows)
    return bool(request.param)


def node_of(model: ir.Model, op_type: str = NEW.name) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def test_channels_pass_through_a_new_activation(known: bool):
    channels = map_channels(image_net(LINE, {}))
    assert known == any(not group.frozen for group in channels.groups)
    assert known == (("z", 1) in {(a.value, a.axis) for a in channels.activations})


def test_a_new_activation_costs_nothing_behind_a_product(known: bool):
    assert known == (node_traffic(node_of(image_net(LINE, {}))) == Traffic())


def test_a_new_activation_follows_its_neighbours_in_float16(known: bool):
    text = "(float[2,3] x) => (float[2,3] y) { a = Exp(x) b = Softsign(a) y = Exp(b) }"
    islands = FloatIslands(graph(text, {}), {}, keep_io=True, evaluate=False)
    assert known == (node_of(islands.model) in islands.reasons)


def test_a_new_activation_is_fused_by_every_target(known: bool):
    node = node_of(image_net(LINE, {}))
    for profile in PROFILES.values():
        assert profile.kernel(node) == ("absorbed" if known else None)


def test_codes_reach_a_layer_through_a_new_activation(known: bool):
    text = """(float[N,4] x) => (float[N,3] y) {
        s = Constant<value_float=0.5>()
        scale = Constant<value=float {0.5}>()
        codes = QuantizeLinear<output_dtype=3>(x, scale)
        floats = DequantizeLinear(codes, scale)
        z = Softsign(floats)
        weight = Constant<value=int8[4,3] {1,2,3,4,5,6,7,8,9,10,11,12}>()
        w = DequantizeLinear(weight, scale)
        y = MatMul(z, w)
    }"""
    (layer,) = quantized_layers(graph(text, {}))
    assert layer.computed == ("int8" if known else "")


def test_a_new_activation_belongs_to_the_layer_before_an_exit(known: bool):
    model = image_net(LINE, {})
    batches = Batches(model)
    answer = find_answer(model, batches)
    (point,) = find_points(model, (Exit(after="w"),), batches, answer)
    assert point.value == ("z" if known else "h")
