"""ONNX files: old ones, those with external data, and agreement with the module they come from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import ModelError
from compressor.graph.costs import macs, parameters
from compressor.models.onnx import ort_runner
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.onnx.file import external_files
from compressor.models.onnx.ort_runner import opener_of
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.lowering import OPSET
from compressor.types.carrier import Capability
from tests.compressor.models.sample_modules import batch_of, lowered
from tests.compressor.passes.quantize.small_models import graph, noise
from tests.compressor.tiny_project import sample_images, tiny_onnx

NETWORKS = ["convolutions", "block", "pair", "tokens"]
LENGTHS = {"n": 3, "batch": 2, "time": 5, "height": 40, "width": 56}
IMAGES = {"image": sample_images(4, 5)}


def saved(model: onnx.ModelProto, path: Path) -> OnnxCarrier:
    onnx.save(model, path)
    return open_onnx(path, OPSET)


def directly(model: onnx.ModelProto | Path, batch: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, batch))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OnnxCarrier]:
    """Return the carrier of the ONNX file that a module was exported to."""
    folder = tmp_path_factory.mktemp("exported")
    made: dict[str, OnnxCarrier] = {}

    def get(name: str) -> OnnxCarrier:
        if name not in made:
            ir.save(lowered(name).graph(), folder / f"{name}.onnx")
            made[name] = open_onnx(folder / f"{name}.onnx", OPSET)
        return made[name]

    return get


def test_a_graph_is_written_out_once_for_all_openings(monkeypatch: pytest.MonkeyPatch):
    written = []
    to_proto = ir.to_proto
    monkeypatch.setattr(ir, "to_proto", lambda model: written.append(model) or to_proto(model))
    opener = opener_of(ir.from_proto(tiny_onnx()))
    first, second = (opener().run(IMAGES) for _ in range(2))
    assert len(written) == 1
    assert np.array_equal(*(next(iter(outputs.values())) for outputs in (first, second)))


def test_freed_memory_is_given_back_for_the_first_opening_alone(monkeypatch: pytest.MonkeyPatch):
    given_back: list[bool] = []
    monkeypatch.setattr(ort_runner, "return_freed_memory", lambda: given_back.append(True))
    opener = opener_of(ir.from_proto(tiny_onnx()))
    opener()
    first = len(given_back)
    opener()
    assert first == len(given_back) == 2


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_the_same_on_both_carriers(name: str, exported: Callable[[str], OnnxCarrier]):
    module, file = lowered(name), exported(name)
    assert file.layers() == module.layers()
    assert (file.inputs, file.outputs) == (module.inputs, module.outputs)
    assert parameters(file.graph()) == parameters(module.graph())
    assert macs(file.graph()) == macs(module.graph())
    assert (file.kind, Capability.TRAIN in file.offers) == ("onnx", False)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_the_same_on_both_carriers(name: str, exported: Callable[[str], OnnxCarrier]):
    module, file = lowered(name), exported(name)
    batch = batch_of(module, LENGTHS)
    changes = {}
    for layer in module.layers():
        assert torch.equal(file.weight(layer), module.weight(layer))
        matrix = layer.canonical(module.weight(layer))
        changes[layer.weight] = layer.stored(matrix * torch.linspace(0.5, 1.5, layer.rows)[:, None])
    ours, theirs = file.with_weights(changes), module.with_weights(changes)
    for layer in module.layers():
        assert torch.equal(ours.weight(layer), changes[layer.weight])
        assert torch.equal(theirs.weight(layer), changes[layer.weight])
    before = list(file.runner().run(batch).values())
    have, want = (list(c.runner().run(batch).values()) for c in (ours, theirs))
    for a, b, old in zip(have, want, before, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert not np.allclose(a, old)
    for layer in module.layers():
        assert torch.equal(file.weight(layer), module.weight(layer))


def test_a_new_weight_may_be_of_another_type(exported: Callable[[str], OnnxCarrier]):
    file = exported("tokens")
    layer = file.layers()[0]
    changed = file.with_weights({layer.weight: file.weight(layer).half()})
    value = changed.graph().graph.initializers[layer.weight]
    assert value.dtype == ir.DataType.FLOAT16
    with pytest.raises(KeyError, match="no initializer 'gone'"):
        file.with_weights({"gone": torch.zeros(1)})


def test_what_is_saved_comes_back(tmp_path: Path):
    carrier = saved(tiny_onnx(), tmp_path / "tiny.onnx")
    large = np.zeros((256, 128), np.float32)
    graph = carrier.graph().clone()
    graph.graph.initializers.add(
        ir.val("large", const_value=ir.tensor(large, name="large"), shape=[256, 128])
    )
    (tmp_path / "state").mkdir()
    carrier.with_graph(graph).save(tmp_path / "state")
    restored = carrier.restore(tmp_path / "state")
    # Large tensors lie beside the graph, where they are mapped and not read.
    tensor = restored.graph().graph.initializers["large"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), large)
    np.testing.assert_array_equal(
        restored.runner().run(IMAGES)["logits"], carrier.runner().run(IMAGES)["logits"]
    )


def test_taps(tmp_path: Path):
    carrier = saved(tiny_onnx(), tmp_path / "tiny.onnx")
    found = carrier.runner(["b", "logits"]).run({**IMAGES, "label": np.zeros(5)})
    assert list(found) == ["logits", "b"]
    assert found["b"].min() == 0


def old_network(opset: int) -> onnx.ModelProto:
    """Make a network as exporters of its time wrote it: attributes, initializers as inputs."""
    rng = np.random.default_rng(0)
    arrays = {
        "conv.weight": rng.normal(size=(4, 1, 3, 3)),
        "conv.bias": rng.normal(size=4),
        "bn.scale": np.ones(4),
        "bn.shift": rng.normal(size=4),
        "bn.mean": rng.normal(size=4),
        "bn.var": np.full(4, 2.0),
        "fc.weight": rng.normal(size=(4, 3)),
    }
    weights = {n: a.astype(np.float32) for n, a in arrays.items()}
    weights["shape"] = np.array([0, -1])
    norm = ["bn.scale", "bn.shift", "bn.mean", "bn.var"]
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "conv.weight", "conv.bias"], ["a"], pads=[1] * 4),
        node("BatchNormalization", ["a", *norm], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("Pad", ["c"], ["p"], pads=[0, 0, 1, 1, 0, 0, 1, 1])
        if opset < 11
        else node("Pad", ["c", "pads"], ["p"]),
        node("ReduceMean", ["p"], ["m"], axes=[2, 3], keepdims=0),
        node("Dropout", ["m"], ["d"], ratio=0.5),
        node("Reshape", ["d", "shape"], ["r"]),
        node("Unsqueeze", ["r"], ["u"], axes=[1]),
        node("Squeeze", ["u"], ["s"], axes=[1]),
        node("MatMul", ["s", "fc.weight"], ["y"]),
        node("Softmax", ["y"], ["z"], axis=1),
        node("Clip", ["z"], ["out"], min=0.1, max=0.9)
        if opset < 11
        else node("Clip", ["z", "low", "high"], ["out"]),
    ]
    if opset >= 11:
        weights["pads"] = np.array([0, 0, 1, 1, 0, 0, 1, 1])
        weights.update(low=np.float32(0.1), high=np.float32(0.9))
    kinds = {"f": TensorProto.FLOAT, "i": TensorProto.INT64}
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 1, 8, 8])]
    inputs += [
        helper.make_tensor_value_info(n, kinds[np.asarray(a).dtype.kind], np.shape(a))
        for n, a in weights.items()
    ]
    graph = helper.make_graph(
        nodes,
        "old",
        inputs,
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


@pytest.mark.parametrize("opset", [7, 9, 11])
def test_old_files_open_and_compute_the_same(tmp_path: Path, opset: int):
    model = old_network(opset)
    onnx.checker.check_model(model)
    carrier = saved(model, tmp_path / "old.onnx")
    assert carrier.graph().opset_imports[""] == OPSET
    assert [str(i) for i in carrier.inputs] == ["image float32[n, 1, 8, 8]"]
    np.testing.assert_allclose(
        carrier.runner().run(IMAGES)["out"], directly(model, IMAGES)[0], rtol=1e-5, atol=1e-6
    )
    assert [(la.name, la.kind, la.rows, la.columns) for la in carrier.layers()] == [
        ("conv", "Conv", 4, 9),
        ("fc", "MatMul", 3, 4),
    ]
    # Neither running statistics nor the arguments of Clip and Dropout are parameters.
    assert parameters(carrier.graph()) == 36 + 4 + 4 + 4 + 12
    assert macs(carrier.graph()) == 64 * 36 + 12


def test_newer_files_keep_their_opset(tmp_path: Path):
    model = tiny_onnx()
    model.opset_import[0].version = 22
    assert saved(model, tmp_path / "new.onnx").graph().opset_imports[""] == 22


def branches() -> onnx.ModelProto:
    """Make a network whose weights lie in the branches of an If."""

    def branch(name: str) -> onnx.GraphProto:
        weight = np.full((4, 3), len(name), np.float32)
        return helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], [f"{name}_out"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, ["n", 3])],
            [numpy_helper.from_array(weight, "w")],
        )

    graph = helper.make_graph(
        [
            helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
            helper.make_node("Greater", ["sum", "zero"], ["positive"]),
            helper.make_node(
                "If", ["positive"], ["y"], then_branch=branch("yes"), else_branch=branch("never")
            ),
        ],
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.float32(0), "zero")],
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


def test_weights_inside_branches_are_layers_too(tmp_path: Path):
    carrier = saved(branches(), tmp_path / "if.onnx")
    layers = carrier.layers()
    assert len({layer.name for layer in layers}) == 2
    doubled = carrier.with_weights({la.weight: carrier.weight(la) * 2 for la in layers})
    for sign, width in ((1, 3), (-1, 5)):
        x = np.full((2, 4), sign, np.float32)
        np.testing.assert_array_equal(carrier.runner().run({"x": x})["y"], x[:, :3] * 4 * width)
        np.testing.assert_array_equal(doubled.runner().run({"x": x})["y"], x[:, :3] * 8 * width)


def external(folder: Path, location: str) -> Path:
    """Write a file whose weights lie in another, and let it name that one differently."""
    folder.mkdir()
    path = folder / "m.onnx"
    onnx.save(tiny_onnx(), path, save_as_external_data=True, location="w.data", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    onnx.save(model, path)
    return path


def test_external_data_beside_the_file(tmp_path: Path):
    path = external(tmp_path / "m", "w.data")
    assert external_files(path) == (tmp_path / "m" / "w.data",)
    np.testing.assert_array_equal(
        open_onnx(path, OPSET).runner().run(IMAGES)["logits"], directly(path, IMAGES)[0]
    )


@pytest.mark.parametrize("location", ["../w.data", "/etc/hostname", "link.data"])
def test_external_data_outside_the_folder(tmp_path: Path, location: str):
    path = external(tmp_path / "m", location)
    (tmp_path / "w.data").write_bytes((tmp_path / "m" / "w.data").read_bytes())
    (tmp_path / "m" / "link.data").symlink_to(tmp_path / "w.data")
    with pytest.raises(ModelError) as caught:
        open_onnx(path, OPSET)
    assert str(caught.value) == (
        f"model {str(path)!r}: keeps 'conv1.weight' outside its folder, at {location!r}; "
        "keep external data beside the model, as files and not as links"
    )


@pytest.mark.parametrize("place", ["attribute", "branch"])
def test_external_data_in_other_places(tmp_path: Path, place: str):
    model = branches()
    if place == "attribute":
        tensor = numpy_helper.from_array(np.zeros(3, np.float32), "t")
        model.graph.node.insert(0, helper.make_node("Constant", [], ["unused"], value=tensor))
        tensor = model.graph.node[0].attribute[0].t
    else:
        tensor = model.graph.node[2].attribute[0].g.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../../secret"), ("length", "12")):
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=r"outside its folder, at '../../secret'"):
        open_onnx(tmp_path / "m.onnx", OPSET)


@pytest.mark.parametrize("location", ["gone.data", "gone/../w.data", "short.data"])
def test_external_data_that_are_not_there(tmp_path: Path, location: str):
    path = external(tmp_path / "m", location)
    content = (tmp_path / "m" / "w.data").read_bytes()
    (tmp_path / "m" / "short.data").write_bytes(content[:-4])
    with pytest.raises(ModelError, match="is missing or too short; copy it beside the model"):
        open_onnx(path, OPSET)


@pytest.mark.parametrize("share", np.linspace(0, 0.99, 12))
def test_no_cut_of_a_file_is_taken_for_whole(tmp_path: Path, share: float):
    content = tiny_onnx().SerializeToString()
    path = tmp_path / "cut.onnx"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="the file is truncated or of another format"):
        open_onnx(path, OPSET)


def test_infinity_in_a_mask_is_as_it_should_be(exported: Callable[[str], OnnxCarrier]):
    values = exported("block").graph().graph.initializers.values()
    assert any(
        v.const_value is not None
        and v.dtype == ir.DataType.FLOAT
        and np.isneginf(v.const_value.numpy()).any()
        for v in values
    )


def test_nan_outside_of_layers(tmp_path: Path):
    model = old_network(9)
    broken = np.array([1, np.nan, 1, 1], np.float32)
    (mean,) = [t for t in model.graph.initializer if t.name == "bn.mean"]
    mean.CopyFrom(numpy_helper.from_array(broken, "bn.mean"))
    carrier = saved(model, tmp_path / "nan.onnx")
    with pytest.raises(ModelError, match=r"'m': tensor 'bn\.mean' holds 1 values that are NaN"):
        carrier.check_finite("model 'm'")


def test_a_graph_that_the_runtime_refuses(tmp_path: Path):
    graph = saved(tiny_onnx(), tmp_path / "m.onnx").graph().clone()
    graph.graph[1].op_type = "Reluu"
    carrier = OnnxCarrier(graph)
    with pytest.raises(ModelError, match=r"ONNX Runtime .* does not load it \(.*Reluu"):
        carrier.runner()


def test_a_batch_that_the_model_does_not_take(tmp_path: Path):
    carrier = saved(tiny_onnx(), tmp_path / "m.onnx")
    for wrong in ({"image": sample_images(1)[:, :, :4]}, {}):
        with pytest.raises(ModelError, match=r"does not run .*check the inputs' shapes"):
            carrier.runner().run(wrong)


def test_a_module_and_its_file_share_no_state(exported: Callable[[str], OnnxCarrier]):
    module = lowered("tokens")
    assert isinstance(module, TorchCarrier)
    layer = module.layers()[0]
    exported("tokens").weight(layer).zero_()
    assert exported("tokens").weight(layer).any()
    assert module.weight(layer).any()


def test_what_an_unused_branch_reads_goes_with_it(tmp_path):
    """Folding and the library leave what such a branch reads to the branch that is no more."""
    carrier = graph(
        """g (float[N, 4] x) => (float[N, 4] y) {
            c = Constant <value_float: float = 0.0> ()
            s = ReduceMax <keepdims = 0> (x)
            k = Greater (s, c)
            unused = If (k) <
                then_branch = t () => (float[N, 4] t1) { t1 = MatMul (x, second) },
                else_branch = e () => (float[N, 4] e1) { e1 = Identity (x) }
            >
            y = MatMul (x, first)
        }""",
        {"first": noise(4, 4), "second": noise(4, 4)},
    )
    ir.save(carrier.graph(), tmp_path / "m.onnx")
    assert set(open_onnx(tmp_path / "m.onnx", 21).tensors()) == {"first"}
