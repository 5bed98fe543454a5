"""A starter spec loads as soon as its data files exist."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from ruamel.yaml import YAML

from compressor.errors import ModelError, SpecError
from compressor.lab.starter import starter_text, write_starter
from compressor.lab.starter_data import Choices
from compressor.run.plan import make_plan
from compressor.spec import schema
from compressor.spec.load import Spec, load_spec
from compressor.spec.source_text import scalar
from tests.compressor.voice import MODEL, Voice
from tests.paths import ROOT

SCHEMA = ROOT / "compressor" / "spec" / "schema.json"


def save_onnx(path: Path, name: str = "image", shape: Sequence[int | str] = ("batch", 4)) -> Path:
    entry = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [1.0] * 16)
    node = helper.make_node("MatMul", [name, "w"], ["output"])
    graph = helper.make_graph([node], "g", [entry], [output], [weight])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def filled(spec: Path) -> Spec:
    for name in ("calibration.npz", "evaluation.npz"):
        np.savez(spec.parent / name, image=np.zeros((2, 4), np.float32))
    return load_spec(spec)


@pytest.mark.parametrize("data", [False, True])
def test_a_model_with_an_operator_that_nothing_knows_gets_no_data(
    tmp_path: Path, data: bool
) -> None:
    model = onnx.load(save_onnx(tmp_path / "net.onnx"))
    model.graph.node.append(helper.make_node("Swish", ["output"], ["last"], domain="my.ops"))
    model.graph.output[0].name = "last"
    model.opset_import.append(helper.make_opsetid("my.ops", 1))
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "arrays.npz", image=np.zeros((2, 4), np.float32), label=np.zeros(2, int))
    choices = Choices(tmp_path / "arrays.npz" if data else Path("-"), metric="accuracy")
    assert not write_starter(tmp_path / "net.onnx", tmp_path / "spec.yaml", choices)
    spec = load_spec(tmp_path / "spec.yaml")
    assert not spec.data
    assert [p.name for p in spec.passes] == ["fuse", "quantize-weights"]
    assert [e.format for e in spec.exports] == ["onnx"], "no other runtime has the operator"
    assert "# ONNX Runtime has no operator my.ops.Swish" in (tmp_path / "spec.yaml").read_text()
    make_plan(spec)


def test_of_an_onnx_file(tmp_path: Path) -> None:
    model = save_onnx(tmp_path / "My net (v2).onnx")
    output = tmp_path / "specs" / "spec.yaml"
    write_starter(model, output)
    spec = filled(output)
    assert spec.name == "My-net-v2"
    assert spec.onnx == model
    assert [p.name for p in spec.passes] == ["fuse", "quantize-static"]
    assert spec.data["calibration"].keys.inputs == {"image": "image"}
    assert spec.data["evaluation"].keys.batch == 32
    assert spec.output == output.parent / "out" / "My-net-v2"
    text = output.read_text()
    line, _, _ = text.partition("\n")
    assert line == f"# yaml-language-server: $schema={SCHEMA.as_uri()}"
    assert "#   image float32[batch, 4]\n" in text
    assert "compress plan spec.yaml " in text


def test_a_first_run_asks_for_no_more_than_the_recipe_gives(tmp_path: Path) -> None:
    """Small models missed half of the bytes, which nobody had asked for: the first run failed."""
    output = tmp_path / "spec.yaml"
    write_starter(save_onnx(tmp_path / "net.onnx"), output)
    spec = filled(output)
    assert spec.limits.size_ratio == 1.0
    assert "  size-ratio: 1.0 # bytes of the artifact / bytes of the float" in output.read_text()


def test_the_schema_is_named_relative_to_a_folder_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "my env" / "compressor" / "spec" / "schema.py"
    monkeypatch.setattr(schema, "__file__", str(installed))
    write_starter(save_onnx(tmp_path / "m.onnx"), tmp_path / "spec.yaml")
    line, _, _ = (tmp_path / "spec.yaml").read_text().partition("\n")
    assert line == "# yaml-language-server: $schema=my%20env/compressor/spec/schema.json"


def test_the_batch_of_a_fixed_input(tmp_path: Path) -> None:
    model = save_onnx(tmp_path / "m.onnx", shape=(1, 4))
    write_starter(model, tmp_path / "spec.yaml")
    assert filled(tmp_path / "spec.yaml").data["evaluation"].keys.batch == 1


@pytest.mark.parametrize("name", ["serving_default_x:0", "a b", "yes", "1", "x\ny", 'q"\\q', "{}"])
def test_names_that_yaml_would_misread(tmp_path: Path, name: str) -> None:
    model = save_onnx(tmp_path / "m.onnx", name=name)
    write_starter(model, tmp_path / "spec.yaml")
    assert filled(tmp_path / "spec.yaml").data["calibration"].keys.inputs == {name: name}


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_scalars_are_read_back_as_they_were(text: str) -> None:
    assert YAML(typ="rt").load(f"key: {scalar(text)}\n")["key"] == text
    assert list(YAML(typ="rt").load(f"{scalar(text)}: 1\n")) == [text]


def test_of_a_checkpoint(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.zeros(3, 4), "n": torch.tensor(1)}}, tmp_path / "m.pt")
    write_starter(tmp_path / "m.pt", tmp_path / "spec.yaml")
    spec = filled(tmp_path / "spec.yaml")
    assert spec.model.factory == "my_package.model:build"
    assert spec.checkpoint == tmp_path / "m.pt"
    assert "(2 tensors, 12 parameters)" in (tmp_path / "spec.yaml").read_text()


def test_lines_are_short(tmp_path: Path) -> None:
    text = starter_text(save_onnx(tmp_path / "m.onnx"), "m.onnx", "spec.yaml")
    assert max(map(len, text.splitlines())) <= 100


def test_of_a_model_with_a_state(tmp_path: Path) -> None:
    """What it says of the data is what the plan wants."""
    voice = Voice(tmp_path)
    write_starter(tmp_path / MODEL, tmp_path / "voice.yaml")
    spec = load_spec(tmp_path / "voice.yaml")
    for role in ("calibration", "evaluation"):
        keys = spec.data[role].keys
        assert (keys.samples, keys.state) == ("feeds", {"state": "stateN"})
        assert keys.inputs == {"input": "input", "sr": "sr"}
    assert make_plan(spec).passes[1].name == "quantize-static"
    text = (tmp_path / "voice.yaml").read_text()
    assert "state float32[2, batch, 64]" in text
    assert max(map(len, text.splitlines())) <= 100
    assert voice.plan().data.keys() == {"calibration", "evaluation"}


@pytest.mark.parametrize(
    ("samples", "output", "state"),
    [(1, "h_next", {"h": "h_next"}), (1, "other", {}), (4, "h_next", {})],
)
def test_of_a_state_for_one_sample(
    tmp_path: Path, samples: int, output: str, state: dict[str, str]
) -> None:
    """Its axes tell nothing; its name does."""
    value = helper.make_tensor_value_info
    inputs = [value(name, TensorProto.FLOAT, [samples, n]) for name, n in (("x", 1), ("h", 6))]
    node = helper.make_node("Add", ["x", "h"], [output])
    graph = helper.make_graph([node], "g", inputs, [value(output, TensorProto.FLOAT, [samples, 6])])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml")
    (tmp_path / "evaluation").mkdir()
    np.savez(tmp_path / "evaluation.npz", x=np.zeros((samples, 1)))
    keys = load_spec(tmp_path / "spec.yaml").data["evaluation"].keys
    assert keys.state == state
    assert keys.samples == ("feeds" if state else None)


@pytest.mark.parametrize("held", [False, True])
def test_a_state_that_the_files_lack_needs_no_name(tmp_path: Path, held: bool) -> None:
    """The output of its form is its next value, whatever it is called."""
    value = helper.make_tensor_value_info
    inputs = [value(name, TensorProto.FLOAT, [1, n]) for name, n in (("x", 1), ("h", 6))]
    outputs = [value(name, TensorProto.FLOAT, [1, n]) for name, n in (("clean", 1), ("next", 6))]
    nodes = [
        helper.make_node("Relu", ["x"], ["clean"]),
        helper.make_node("Add", ["x", "h"], ["next"]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    more = {"h": np.zeros((1, 6), np.float32)} if held else {}
    for number in range(2):
        np.savez(tmp_path / "data" / f"{number}.npz", x=np.zeros((5, 1, 1), np.float32), **more)
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml", Choices(data=tmp_path / "data"))
    keys = load_spec(tmp_path / "spec.yaml").data["evaluation"].keys
    assert keys.state == ({} if held else {"h": "next"})


def test_states_of_many_sequences_are_what_the_files_do_not_hold(tmp_path: Path) -> None:
    """Only the files tell them from other inputs with samples, and their names."""
    value = helper.make_tensor_value_info
    sizes = {"x": 3, "h": 6, "c": 6, "other": 6}
    inputs = [value(name, TensorProto.FLOAT, ["batch", n]) for name, n in sizes.items()]
    outputs = [value(name, TensorProto.FLOAT, ["batch", 6]) for name in ("hN", "cN", "y")]
    nodes = [
        helper.make_node("Identity", ["h"], ["hN"]),
        helper.make_node("Add", ["c", "other"], ["cN"]),
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1]),
        helper.make_node("Add", ["mean", "h"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    for number in range(2):
        np.savez(tmp_path / "data" / f"{number}.npz", x=np.zeros((5, 1, 3), np.float32))
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml", Choices(data=tmp_path / "data"))
    keys = load_spec(tmp_path / "spec.yaml").data["evaluation"].keys
    assert keys.state == {"h": "hN", "c": "cN"}
    assert keys.inputs == {"x": "x", "other": "other"}


def test_of_a_model_with_a_scalar_and_no_state(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["n", 4]), value("gain", TensorProto.FLOAT, [])]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "gain"], ["y"])],
        "g",
        inputs,
        [value("y", TensorProto.FLOAT, ["n", 4])],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml")
    for role in ("calibration", "evaluation"):
        (tmp_path / role).mkdir()
    data = load_spec(tmp_path / "spec.yaml").data
    assert data.keys() == {"evaluation"}  # it has no weights to quantize
    keys = data["evaluation"].keys
    assert (keys.samples, keys.state) == ("feeds", {})
    assert keys.inputs == {"x": "x", "gain": "gain"}


@pytest.mark.parametrize(
    ("shape", "feeds"),
    [
        (["n", 3, "h", "w"], True),
        (["n", "h", "w", 1], True),
        (["n", 3, 48, "w"], True),
        (["n", 3, 32, 32], False),
        (["n", 8, "h", "w"], False),
        (["n", "s", 4], False),
    ],
)
def test_images_of_any_size_are_feeds(
    tmp_path: Path, shape: list[int | str], *, feeds: bool
) -> None:
    value = helper.make_tensor_value_info
    inputs, outputs = ([value(name, TensorProto.FLOAT, shape)] for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation.npz").touch()
    keys = load_spec(tmp_path / "spec.yaml").data["evaluation"].keys
    assert (keys.samples == "feeds") == feeds
    assert (
        "Samples may differ in size: x float32[" in (tmp_path / "spec.yaml").read_text()
    ) == feeds


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "spec.yaml"
    output.write_text("mine")
    with pytest.raises(SpecError, match="exists already; name another file with -o"):
        write_starter(save_onnx(tmp_path / "m.onnx"), output)
    assert output.read_text() == "mine"


def test_models_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "cut.onnx").write_bytes(b"\x08\x07\x12")
    (tmp_path / "cut.pt").write_bytes(b"PK")
    for name, error in (("gone", SpecError), ("cut.onnx", ModelError), ("cut.pt", ModelError)):
        with pytest.raises(error, match=name):
            write_starter(tmp_path / name, tmp_path / "spec.yaml")
    assert not (tmp_path / "spec.yaml").exists()


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"image": 11}, (6, 3)),  # halves of 6 and 5
        ({"x_train": 11, "x_test": 8}, (9, 6)),
        ({"x_train": 700, "x_test": 9}, (510, 9)),
    ],
)
def test_whole_batches_where_the_model_fixes_them(
    tmp_path: Path, arrays: dict[str, int], expected: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal((rows, 4)).astype(np.float32) for n, rows in arrays.items()}
    np.savez(tmp_path / "data.npz", **values)  # type: ignore[arg-type]  # of its keyword
    output = tmp_path / "spec.yaml"
    model = save_onnx(tmp_path / "m.onnx", shape=(3, 4))
    write_starter(model, output, Choices(tmp_path / "data.npz"))
    data = make_plan(load_spec(output)).data
    assert (data["calibration"].samples, data["evaluation"].samples) == expected


def test_a_dollar_sign_in_a_path(tmp_path: Path) -> None:
    model = save_onnx(tmp_path / "a $X.onnx")
    np.savez(tmp_path / "b${Y}.npz", image=np.zeros((8, 4), np.float32))
    write_starter(model, tmp_path / "spec.yaml", Choices(tmp_path / "b${Y}.npz"))
    spec = load_spec(tmp_path / "spec.yaml")
    assert spec.onnx == model
