"""ONNX networks as other people write them, through the passes and out again."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor import catalog
from compressor.calibration.collect import collect_statistics, make_observer
from compressor.errors import ModelError
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.torch.lowering import OPSET
from compressor.types.carrier import Capability, Carrier
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from tests.compressor.models import wild_models as wild
from tests.compressor.models.wild_models import Arrays, Wild

MODELS: Mapping[str, Callable[[], Wild]] = {
    "if": wild.branches,
    "untaken": partial(wild.untaken, inside=False),
    "untaken-inside": partial(wild.untaken, inside=True),
    "loop": wild.loop,
    "scan": wild.scan,
    "halves": wild.halves,
    "halves-inside": wild.halves_inside,
    "contrib": wild.contrib,
    "functions": wild.functions,
    "several": wild.several,
}
STEPS: Mapping[str, tuple[str, ...]] = {
    "nothing": (),
    "fuse": ("fuse",),
    "dynamic": ("quantize-dynamic",),
    "cast": ("cast",),
    "static": ("quantize-static",),
    "fuse-static": ("fuse", "quantize-static"),
}
ERRORS = {"nothing": 1e-5, "fuse": 1e-5, "cast": 0.01, "dynamic": 0.04}
CONTEXT = PassContext(targets=frozenset({"ort-cpu"}))
ROUNDS = 4


def opened(sample: Wild, folder: Path) -> OnnxCarrier:
    onnx.save(sample.model, folder / "wild.onnx")
    return open_onnx(folder / "wild.onnx", OPSET)


def session(model: onnx.ModelProto | Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def applied(
    carrier: Carrier, name: str, inputs: Callable[[int], Arrays], options: Mapping[str, Any] = {}
) -> Carrier:
    """Apply a pass as a run does, after the preview that a plan makes."""
    step = catalog.load("pass", name).model_validate(options)
    survey = step.survey(carrier, CONTEXT)
    made = {r.key: make_observer(r.observer, r.options).placeholder() for r in survey.requests}
    step.preview(carrier, CONTEXT, made)
    statistics = collect_statistics(
        carrier, [inputs(seed) for seed in range(ROUNDS)], survey.requests
    )
    changed: Carrier = step.apply(carrier, CONTEXT, statistics).carrier
    return changed


def exported(carrier: Carrier, folder: Path) -> Path:
    folder.mkdir()
    exporter = catalog.load("exporter", "onnx")()
    exporter.check(carrier)
    path: Path = exporter.write(carrier, folder, ExportContext("wild", "0" * 64))[0]
    return path


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_agree(tmp_path: Path, name: str, steps: str) -> None:
    sample = MODELS[name]()
    widens = name.startswith("halves") and steps not in ("nothing", "fuse")
    carrier: Carrier = opened(sample, tmp_path)
    if widens:
        carrier = applied(carrier, "cast", sample.inputs, {"dtype": "fp32"})
        assert {layer.dtype for layer in carrier.layers()} == {"float32"}
    for step in STEPS[steps]:
        carrier = applied(carrier, step, sample.inputs)
    path = exported(carrier, tmp_path / "out")
    onnx.checker.check_model(str(path), full_check=True)
    before, after = session(sample.model), session(path)
    for role in ("get_inputs", "get_outputs"):
        wanted = [(v.name, v.type, v.shape) for v in getattr(before, role)()]
        assert [(v.name, v.type, v.shape) for v in getattr(after, role)()] == wanted
    for seed in range(ROUNDS):
        batch = sample.inputs(seed)
        for ours, theirs in zip(after.run(None, batch), before.run(None, batch), strict=True):
            difference = np.abs(ours.astype(np.float64) - theirs).max()
            assert difference <= ERRORS.get(steps, 0.05) * np.abs(theirs).max()


@pytest.mark.parametrize("name", MODELS)
def test_all_weights_are_layers(tmp_path: Path, name: str) -> None:
    sample = MODELS[name]()
    carrier = opened(sample, tmp_path)
    assert {layer.name for layer in carrier.layers()} == sample.layers
    for layer in carrier.layers():
        assert carrier.weight(layer).abs().sum() > 0


@pytest.mark.parametrize("keep_io", [True, False])
def test_halves_become_floats_everywhere(tmp_path: Path, keep_io: bool) -> None:
    """In branches, in what attributes make, and at both ends."""
    branch = {
        name: helper.make_graph(
            [
                helper.make_node("MatMul", ["a", f"{name}.weight"], [f"{name}_m"]),
                helper.make_node("Cast", [f"{name}_m"], [f"{name}_y"], to=wild.HALF),
            ],
            name,
            [],
            [wild.value(f"{name}_y", wild.HALF, ["n", 8])],
            [numpy_helper.from_array(wild.matrix(64, 8, i, np.float16), f"{name}.weight")],
        )
        for i, name in enumerate(("one", "two"))
    }
    fill = numpy_helper.from_array(np.array([0.5], np.float16))
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["half"], value=fill),
        helper.make_node("Add", ["x", "half"], ["a"]),
        helper.make_node(
            "If", ["flag"], ["z"], then_branch=branch["one"], else_branch=branch["two"]
        ),
    ]
    ends = [wild.value("x", wild.HALF, ["n", 64]), wild.value("flag", wild.BOOL, [])]
    model = wild.made(nodes, ends, [wild.value("z", wild.HALF, ["n", 8])], {})
    carrier = opened(Wild(model, lambda _: {}, frozenset()), tmp_path)
    options = {"dtype": "fp32", "keep-io": keep_io}
    after = applied(carrier, "cast", lambda _: {}, options)
    kind = "float16" if keep_io else "float32"
    assert [s.dtype for s in (after.inputs[0], after.outputs[0])] == [kind, kind]
    assert [s.name for s in after.outputs] == ["z"]
    found = session(exported(after, tmp_path / "out"))
    for flag in (True, False):
        batch = {"x": wild.rows(1, dtype=np.float16), "flag": np.array(flag)}
        wanted = session(model).run(None, batch)[0]
        given = found.run(None, {**batch, "x": batch["x"].astype(kind)})[0]
        assert given.dtype == kind
        np.testing.assert_allclose(given, wanted, atol=0.01)


def test_subgraphs_of_an_old_opset(tmp_path: Path) -> None:
    """The arguments of inner nodes become inputs too."""

    def branch(name: str, most: float) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Unsqueeze", ["x"], [f"{name}_u"], axes=[1]),
            helper.make_node("Squeeze", [f"{name}_u"], [f"{name}_s"], axes=[1]),
            helper.make_node("Clip", [f"{name}_s"], [f"{name}_c"], min=-most, max=most),
            helper.make_node("MatMul", [f"{name}_c", f"{name}.weight"], [f"{name}_y"]),
        ]
        weight = numpy_helper.from_array(wild.matrix(64, 8, len(name)), f"{name}.weight")
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, ["n", 8])
        return helper.make_graph(nodes, name, [], [output], [weight])

    choice = helper.make_node(
        "If", ["flag"], ["y"], then_branch=branch("low", 0.5), else_branch=branch("high", 1.0)
    )
    model = wild.made(
        [choice],
        [wild.value("x", wild.FLOAT, ["n", 64]), wild.value("flag", wild.BOOL, [])],
        [wild.value("y", wild.FLOAT, ["n", 8])],
        {},
        opset=9,
    )
    model.ir_version = 4
    carrier = opened(Wild(model, lambda _: {}, frozenset()), tmp_path)
    assert carrier.graph().opset_imports[""] == OPSET
    before = session(model)
    for flag in (True, False):
        batch = {"x": wild.rows(1), "flag": np.array(flag)}
        np.testing.assert_allclose(
            carrier.runner().run(batch)["y"], before.run(None, batch)[0], rtol=1e-5
        )


def test_a_negative_length_is_dynamic(tmp_path: Path) -> None:
    """Paddle's and old TensorFlow's exporters write -1, which ONNX Runtime takes as any length."""
    branch = [
        helper.make_graph(
            [helper.make_node(operator, ["x"], [f"{operator}_y"])],
            operator,
            [],
            [wild.value(f"{operator}_y", wild.FLOAT, [-1, 4])],
        )
        for operator in ("Relu", "Neg")
    ]
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch[0], else_branch=branch[1])
    ends = [wild.value("x", wild.FLOAT, [-1, 4]), wild.value("flag", wild.BOOL, [])]
    model = wild.made([node], ends, [wild.value("y", wild.FLOAT, [-1, 4])], {})
    carrier = opened(Wild(model, lambda _: {}, frozenset()), tmp_path)
    assert carrier.inputs[0].shape == (None, 4)
    assert not isinstance(carrier.outputs[0].shape[0], int)
    written = onnx.load(exported(carrier, tmp_path / "out"))
    assert b"\xff\xff\xff\xff" not in written.graph.SerializeToString()
    batch = {"x": -np.ones((3, 4), np.float32), "flag": np.array(True)}
    (output,) = session(written).run(None, batch)
    assert output.shape == (3, 4)
    assert not output.any()


def test_one_value_as_two_outputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Identity", ["y"], ["again"])]
    outputs = [wild.value(name, wild.FLOAT, ["n", 64]) for name in ("y", "again")]
    model = wild.made(nodes, [wild.value("x", wild.FLOAT, ["n", 64])], outputs, {})
    carrier = opened(Wild(model, lambda _: {}, frozenset()), tmp_path)
    batch = {"x": wild.rows(2)}
    for current in (carrier, applied(carrier, "fuse", lambda _: batch)):
        found = session(exported(current, tmp_path / f"out{id(current)}")).run(None, batch)
        np.testing.assert_array_equal(found[0], np.maximum(batch["x"], 0))
        np.testing.assert_array_equal(found[1], found[0])
        assert [spec.name for spec in current.outputs] == ["y", "again"]


def test_an_operator_of_a_foreign_domain(tmp_path: Path) -> None:
    sample = wild.foreign()
    carrier = opened(sample, tmp_path)
    assert carrier.offers == {Capability.WEIGHTS, Capability.GRAPH}
    with pytest.raises(ModelError, match=r"cannot be run: .* no operator com\.acme\.Swirl"):
        carrier.runner()
    after = applied(applied(carrier, "fuse", sample.inputs), "quantize-dynamic", sample.inputs)
    path = exported(after, tmp_path / "out")
    written = onnx.load(path)
    (swirl,) = [node for node in written.graph.node if node.domain == "com.acme"]
    assert (swirl.op_type, helper.get_node_attr_value(swirl, "strength")) == ("Swirl", 3)
    assert {entry.domain: entry.version for entry in written.opset_import}["com.acme"] == 1
    assert catalog.load("exporter", "onnx")().check_written(after, path) == "4 tensors read back"


def test_an_output_has_the_axes_that_it_is_computed_with(tmp_path: Path) -> None:
    """A file may state others; ONNX Runtime warns, and gives what is computed."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 13]>
        g (float[b, 2, t] x) => (float[1, s] y)
        { sizes = Shape(x)  lengths = Abs(sizes)  moved = Relu(x)  y = Reshape(moved, lengths) }
    """)
    onnx.save(model, tmp_path / "stated.onnx")
    carrier: Carrier = open_onnx(tmp_path / "stated.onnx", OPSET)
    x = np.ones((3, 2, 5), np.float32)
    path = exported(applied(carrier, "fuse", lambda _: {"x": x}), tmp_path / "out")
    assert session(path).run(None, {"x": x})[0].shape == x.shape
