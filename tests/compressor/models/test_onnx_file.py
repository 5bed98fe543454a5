"""Broken ONNX files: each is refused at plan time, by a message with a remedy, and left alone."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from compressor.cli.application import application
from compressor.errors import ExitCode, ModelError, SpecError
from compressor.models.onnx.carrier import open_onnx
from compressor.models.onnx.file import read_onnx
from compressor.models.torch.lowering import OPSET
from tests.compressor.tiny_project import ONNX, Project, sample_images, tiny_onnx

Breakage = Callable[[onnx.ModelProto], None]
FLOAT = TensorProto.FLOAT


def weight(model: onnx.ModelProto, name: str = "conv2.weight") -> TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def renamed_output(model: onnx.ModelProto) -> None:
    model.graph.node[1].output[0] = "a"


def output_named_like_a_weight(model: onnx.ModelProto) -> None:
    model.graph.node[1].output[0] = "conv1.bias"


def two_outputs_of_one_name(model: onnx.ModelProto) -> None:
    model.graph.output.append(model.graph.output[0])


def two_inputs_of_one_name(model: onnx.ModelProto) -> None:
    model.graph.input.append(model.graph.input[0])


def two_weights_of_one_name(model: onnx.ModelProto) -> None:
    weight(model).name = "conv1.weight"


def cyclic(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "sum"
    model.graph.node.insert(0, helper.make_node("Add", ["image", "b"], ["sum"], "join"))


def cyclic_in_a_branch(model: onnx.ModelProto) -> None:
    branch = helper.make_graph(
        [helper.make_node("Add", ["f", "q"], ["p"]), helper.make_node("Relu", ["p"], ["q"])],
        "branch",
        [],
        [helper.make_tensor_value_info("q", FLOAT, None)],
    )
    node = helper.make_node("If", ["yes"], ["ff"], then_branch=branch, else_branch=branch)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.insert(6, node)
    model.graph.node[7].input[0] = "ff"


def recursive_function(model: onnx.ModelProto) -> None:
    body = helper.make_function(
        "own",
        "Again",
        ["x"],
        ["y"],
        [helper.make_node("Again", ["x"], ["y"], domain="own")],
        [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
    )
    model.functions.append(body)
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[1].CopyFrom(helper.make_node("Again", ["a"], ["b"], domain="own"))


def chained(model: onnx.ModelProto, functions: int, calls: int) -> None:
    """Let a function call the next one so many times, and that the next, and so on."""
    model.opset_import.append(helper.make_opsetid("own", 1))
    for number in range(functions):
        last = number == functions - 1
        names = ["x", *(f"t{i}" for i in range(1 if last else calls))]
        operator, domain = ("Relu", "") if last else (f"Next{number + 1}", "own")
        nodes = [helper.make_node(operator, [a], [b], domain=domain) for a, b in pairwise(names)]
        name, opsets = f"Next{number}", model.opset_import
        function = helper.make_function("own", name, ["x"], [names[-1]], nodes, opsets)
        model.functions.append(function)
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(helper.make_node("Next0", ["before"], ["logits"], domain="own"))


def doubling(model: onnx.ModelProto) -> None:
    chained(model, functions=26, calls=2)


def deep(model: onnx.ModelProto) -> None:
    chained(model, functions=3000, calls=1)


def doubling_in_branches(model: onnx.ModelProto) -> None:
    doubling(model)
    for function in model.functions[:-1]:
        name = f"Next{int(function.name[4:]) + 1}"
        call = helper.make_node(name, ["x"], ["z"], domain="own")
        branch = helper.make_graph(
            [call], "b", [], [helper.make_tensor_value_info("z", FLOAT, None)]
        )
        both = {"then_branch": branch, "else_branch": branch}
        del function.node[:]
        function.node.append(helper.make_node("If", ["x"], [function.output[0]], **both))


def unknown_value(model: onnx.ModelProto) -> None:
    model.graph.node[1].input[0] = "nobody"


def unknown_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "nobody"


def types_that_differ(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), "one"))
    model.graph.node[1].CopyFrom(helper.make_node("Add", ["a", "one"], ["b"], "plus"))


def shapes_that_differ(model: onnx.ModelProto) -> None:
    weight(model, "fc.weight").CopyFrom(
        numpy_helper.from_array(np.ones((4, 7), np.float32), "fc.weight")
    )


def weights_of_a_declared_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64


def misspelt(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Reluu"


def attribute_of_another_type(model: onnx.ModelProto) -> None:
    (attribute,) = model.graph.node[-1].attribute
    attribute.type = onnx.AttributeProto.FLOAT


def missing_input(model: onnx.ModelProto) -> None:
    model.graph.node[-1].input[1] = ""


def newer_operator(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 19
    model.graph.node[1].op_type = "Gelu"


def newest_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


def no_opset_of_this_domain(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "com.microsoft"


def newest_format(model: onnx.ModelProto) -> None:
    model.ir_version = onnx.IR_VERSION + 1


def no_outputs(model: onnx.ModelProto) -> None:
    del model.graph.output[:]


def input_without_rank(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def text(model: onnx.ModelProto) -> None:
    shape = helper.make_tensor_value_info("label", TensorProto.STRING, [1])
    model.graph.node.append(helper.make_node("Constant", [], ["label"], value_strings=["cat"]))
    model.graph.output.append(shape)


def sequence(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("SequenceConstruct", ["logits"], ["all"]))
    model.graph.output.append(helper.make_tensor_sequence_value_info("all", FLOAT, None))


def optional(model: onnx.ModelProto) -> None:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [1]))
    model.graph.input.append(helper.make_value_info("extra", kind))


def untyped_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 0


def sparse(model: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    index = numpy_helper.from_array(np.zeros(1, np.int64), "s_i")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, index, [4]))


def short_data(model: onnx.ModelProto) -> None:
    weight(model).raw_data = weight(model).raw_data[:-4]


def other_shape(model: onnx.ModelProto) -> None:
    weight(model).dims[0] = 9


def negative_shape(model: onnx.ModelProto) -> None:
    weight(model).dims[0] = -8


def huge_shape(model: onnx.ModelProto) -> None:
    weight(model).dims[0] = 2**62


def unknown_type(model: onnx.ModelProto) -> None:
    weight(model).data_type = 77


def nodes_of_one_name(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = "same"


def few_typed_values(model: onnx.ModelProto) -> None:
    weight(model).ClearField("raw_data")
    weight(model).float_data.extend([1.0, 2.0])


BROKEN: list[tuple[Breakage, str]] = [
    (renamed_output, r"writes 'a' twice, the second time in Relu 'a'"),
    (output_named_like_a_weight, r"writes 'conv1.bias' twice"),
    (two_outputs_of_one_name, r"has two outputs named 'logits'"),
    (two_inputs_of_one_name, r"has two inputs named 'image'"),
    (two_weights_of_one_name, r"has two initializers named 'conv1.weight'"),
    (cyclic, r"holds a cycle of 3 nodes \(.*Add 'join'"),
    (cyclic_in_a_branch, r"holds a cycle of 2 nodes"),
    (recursive_function, r"has a function 'Again' that calls itself"),
    (doubling, r"is too large: its functions become 33,554,43\d nodes; export it without"),
    (doubling_in_branches, r"is too large: its functions become 67,108,8\d\d nodes"),
    (deep, r"is too large: its functions call each other 3,000 deep; export it without"),
    (unknown_value, r"Relu 'b' reads 'nobody', which nothing writes"),
    (unknown_output, r"gives 'nobody', which nothing writes"),
    (types_that_differ, r"ONNX Runtime .* does not load it \(.*Add.*tensor\(int64\)"),
    (shapes_that_differ, r"ONNX Runtime .* does not load it \(.*ShapeInferenceError"),
    (weights_of_a_declared_type, r"ONNX Runtime .* does not load it \(.*logits"),
    (nodes_of_one_name, r"ONNX Runtime .* does not load it \(.*; clear the names of the nodes"),
    (misspelt, r"node 'b' has the operator 'Reluu', which opset 21 does not have"),
    (attribute_of_another_type, r"a 'Gemm', has the attribute 'transB' of type FLOAT; the file"),
    (missing_input, r"a 'Gemm', lacks its input 'B'; the file was edited"),
    (newer_operator, r"'Gelu', which opset 19 does not have; give the file the opset"),
    (newest_opset, r"has opset 999, the installed onnx knows 1 to"),
    (no_opset_of_this_domain, r"does not say which opset its Conv belongs to"),
    (newest_format, r"has IR version \d+, newer than the installed onnx"),
    (no_outputs, r"has no outputs"),
    (
        sequence,
        r"output 'all' is a sequence; inputs and outputs have to be tensors; export the model "
        r"again with the tensors in it \(skl2onnx: options={'zipmap': False}\)",
    ),
    (text, r"output 'label' is text; cut off what works on text, and export the model again"),
    (input_without_rank, r"input 'image' has no shape; export the model again; dynamic axes may"),
    (optional, r"input 'extra' is a optional"),
    (untyped_input, r"input 'image' has no element type"),
    (sparse, r"holds sparse initializers"),
    (short_data, r"'conv2.weight' holds 2300 bytes, but its shape \[8, 8, 3, 3\] needs 2304"),
    (other_shape, r"'conv2.weight' holds 2304 bytes, but its shape \[9, 8, 3, 3\] needs 2592"),
    (negative_shape, r"'conv2.weight' has a negative length in its shape"),
    (huge_shape, r"'conv2.weight' holds 2304 bytes"),
    (unknown_type, r"'conv2.weight' has element type 77, which is not known"),
    (few_typed_values, r"'conv2.weight' holds 2 values, but its shape \[8, 8, 3, 3\] needs 576"),
]


@pytest.mark.parametrize(("breakage", "message"), BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_broken_graphs(tmp_path: Path, breakage: Breakage, message: str) -> None:
    model = tiny_onnx()
    breakage(model)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    before = path.read_bytes()
    with pytest.raises(ModelError, match=message) as caught:
        open_onnx(path, OPSET)
    assert str(caught.value).startswith(f"model '{path}': ")
    assert caught.value.remedy
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == before


def test_the_tiny_network_itself_is_not_broken(tmp_path: Path) -> None:
    onnx.save(tiny_onnx(), tmp_path / "m.onnx")
    assert open_onnx(tmp_path / "m.onnx", OPSET).outputs[0].name == "logits"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; the file is truncated or of another format"),
        (b"This is a letter, not a network.\n" * 9, "the file is truncated or of another format"),
        (b"\x80\x04\x95" + bytes(100), "the file is truncated or of another format"),
        (tiny_onnx().SerializeToString()[:-900], "the file is truncated or of another format"),
    ],
    ids=["empty", "text", "pickle", "cut"],
)
def test_files_of_other_kinds(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        open_onnx(path, OPSET)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is a folder; give the \.onnx file in it"):
        open_onnx(tmp_path, OPSET)
    with pytest.raises(SpecError, match=r"does not exist; check model\.onnx"):
        open_onnx(tmp_path / "gone.onnx", OPSET)


def test_nodes_in_another_order(tmp_path: Path) -> None:
    model = tiny_onnx()
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "m.onnx")
    assert [n.op_type for n in read_onnx(tmp_path / "m.onnx").graph][:2] == ["Conv", "Relu"]
    straight, images = tmp_path / "straight.onnx", {"image": sample_images(3)}
    onnx.save(tiny_onnx(), straight)
    np.testing.assert_array_equal(
        open_onnx(tmp_path / "m.onnx", OPSET).runner().run(images)["logits"],
        open_onnx(straight, OPSET).runner().run(images)["logits"],
    )


@pytest.mark.parametrize(
    ("breakage", "code"),
    [(cyclic, ExitCode.BAD_INPUT), (types_that_differ, ExitCode.BAD_INPUT), (None, 2)],
    ids=["cyclic", "types", "folder"],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_the_command_line(
    on_onnx: Project,
    breakage: Breakage | None,
    code: int,
    command: str,
) -> None:
    model = tiny_onnx()
    if breakage is None:
        on_onnx.spec["model"] = {"onnx": "."}
    else:
        breakage(model)
    (on_onnx.folder / ONNX).write_bytes(model.SerializeToString())
    before = (on_onnx.folder / ONNX).read_bytes()
    result = CliRunner().invoke(application, [command, str(on_onnx.path)])
    assert result.exit_code == code
    assert "model '" in result.output
    assert "Traceback" not in result.output
    assert not on_onnx.output.exists()
    assert (on_onnx.folder / ONNX).read_bytes() == before


def test_a_producer_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = tiny_onnx()
    model.producer_name = "maker!"
    path.write_bytes(model.SerializeToString().replace(b"maker!", b"maker\xff"))
    assert read_onnx(path).producer_name == "maker\ufffd"


def test_a_type_that_the_runtime_lacks_is_named(tmp_path: Path) -> None:
    """Another opset was the remedy for a file of such a type, which has the same gap in each."""
    short = TensorProto.INT16
    shapes = [helper.make_tensor_value_info(name, short, ["n", 1, 2, 2]) for name in "xy"]
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([node], "short", shapes[:1], shapes[1:])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / ONNX)
    with pytest.raises(ModelError, match="export the model in float32: it has that operator for"):
        open_onnx(tmp_path / ONNX, OPSET)
