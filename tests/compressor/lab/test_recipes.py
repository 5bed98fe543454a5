"""``compress init`` chooses the passes by what is in the file, and the plan accepts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import ModelError
from compressor.lab.starter import write_starter
from compressor.run.plan import Plan, make_plan
from compressor.spec.load import Spec, load_spec
from compressor.types.tensors import Array
from tests.compressor.passes.quantize import guests
from tests.compressor.passes.quantize.guests import IMAGES, ROWS, network, node, weight
from tests.compressor.passes.quantize.test_halves import halved

IDS = TensorProto.INT64


def attention(words: bool) -> onnx.ModelProto:
    """One block that attends, with scores for words or for four classes."""
    nodes = [
        node("Gather", ["table.weight", "x"], ["a"]),
        *(node("MatMul", ["a", f"{n}.weight"], [n]) for n in "qkv"),
        node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["scores"]),
        node("Softmax", ["scores"], ["shares"]),
        node("MatMul", ["shares", "v"], ["mixed"]),
        node("MatMul", ["mixed", "out.weight"], ["y"]),
    ]
    width = 100 if words else 4
    arrays = {f"{n}.weight": weight(128, 128) for n in "qkv"}
    arrays |= {"table.weight": weight(100, 128), "out.weight": weight(128, width)}
    return network(nodes, arrays, (IDS, ["n", 5]), (guests.FLOAT, ["n", 5, width]))


def recurrent(width: int = 4) -> onnx.ModelProto:
    """An LSTM that is most of the model, unless its last layer is wide."""
    nodes = [
        node("LSTM", ["x", "lstm.W", "lstm.R"], ["d"], hidden_size=32),
        node("Squeeze", ["d", "one"], ["e"]),
        node("MatMul", ["e", "out.weight"], ["y"]),
    ]
    arrays = {
        "lstm.W": weight(1, 128, 16),
        "lstm.R": weight(1, 128, 32),
        "one": np.array([1]),
        "out.weight": weight(32, width),
    }
    return network(nodes, arrays, (guests.FLOAT, [8, 5, 16]))


def linear() -> onnx.ModelProto:
    return network([node("MatMul", ["x", "w"], ["y"])], {"w": weight(16, 4)}, (1, ["n", 16]))


def mixed() -> onnx.ModelProto:
    """A small convolution before a large linear layer."""
    nodes = [
        node("Conv", ["x", "conv.weight"], ["c"]),
        node("Flatten", ["c"], ["f"]),
        node("MatMul", ["f", "w"], ["y"]),
    ]
    return network(nodes, {"conv.weight": weight(2, 3, 3, 3), "w": weight(2 * 36, 40)})


def plain() -> onnx.ModelProto:
    return network([node("Relu", ["x"], ["y"])], {})


def started(model: onnx.ModelProto | Path, folder: Path, x: Array) -> tuple[Spec, str, Plan]:
    """Write a starter spec, put data in place, and plan it."""
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, folder / "guest.onnx")
    write_starter(folder / "guest.onnx", folder / "spec.yaml")
    for name in ("calibration", "evaluation"):
        np.savez(folder / f"{name}.npz", x=x)
    spec = load_spec(folder / "spec.yaml")
    return spec, (folder / "spec.yaml").read_text(), make_plan(spec)


TOKENS = np.arange(40).reshape(8, 5)
STATIC, DYNAMIC = ["fuse", "quantize-static"], ["fuse", "quantize-dynamic"]


@pytest.mark.parametrize(
    ("make", "x", "title", "passes"),
    [
        (guests.convolutional, IMAGES, "a convolutional network", STATIC),
        (recurrent, ROWS, "a recurrent network", DYNAMIC),
        (lambda: recurrent(400), ROWS, "a network of linear and recurrent layers", STATIC),
        (lambda: attention(False), TOKENS, "an encoder of the transformer family", DYNAMIC),
        (lambda: attention(True), TOKENS, "a decoder of text", ["fuse", "quantize-weights"]),
        (linear, ROWS[:, 0], "a network of linear layers", STATIC),
        (mixed, IMAGES, "a network of convolutional and linear layers", STATIC),
        (plain, IMAGES, "a model without weights to quantize", ["fuse"]),
        (
            lambda: halved(guests.convolutional(), "float16"),
            IMAGES.astype(np.float16),
            "a convolutional network in half precision",
            STATIC,
        ),
        (
            lambda: halved(attention(False), "bfloat16", ends=False),
            TOKENS,
            "an encoder of the transformer family in half precision",
            DYNAMIC,
        ),
    ],
)
def test_what_is_seen_decides(
    tmp_path: Path,
    make: Callable[[], onnx.ModelProto],
    x: Array,
    title: str,
    passes: list[str],
) -> None:
    spec, text, plan = started(make(), tmp_path, x)
    assert f"# For {title}:\n" in text
    assert [step.name for step in spec.passes] == [p.name for p in plan.passes] == passes
    calibrated = "quantize-static" in passes
    assert spec.data.keys() == {"evaluation", *(["calibration"] if calibrated else [])}
    assert all(any(row.touched for row in p.layers) for p in plan.passes if p.name != "fuse")
    assert max(map(len, text.splitlines())) <= 100
    nothing = title == "a model without weights to quantize"
    assert ("  size-ratio: null #" in text) == nothing, "its own limit failed the first run"


@pytest.mark.parametrize("how", ["QDQ-QUInt8", "QOperator-QInt8", "dynamic-QInt8"])
def test_what_is_quantized_already(tmp_path: Path, how: str) -> None:
    guests.by_runtime(guests.convolutional(), how, IMAGES, tmp_path)
    _, text, plan = started(tmp_path / "guest.onnx", tmp_path, IMAGES)
    assert [p.name for p in plan.passes] == ["cast", *STATIC]
    assert "# For a convolutional network, quantized already:\n" in text
    assert "size-ratio: 1.2" in text


def test_groups_that_columns_divide_into(tmp_path: Path) -> None:
    text = started(attention(True), tmp_path, TOKENS)[1]
    assert "preset: int4-g128\n    method: hqq\n" in text


def test_trees_have_nothing_to_compress(tmp_path: Path) -> None:
    """Their other output is a sequence of maps, which no command reads."""
    nodes = [
        helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "p"], domain="ai.onnx.ml"),
        helper.make_node("ZipMap", ["p"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]),
    ]
    guest = network(nodes, {"shape": np.array([1, 2])})
    guest.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    onnx.save(guest, tmp_path / "trees.onnx")
    message = r"computes with TreeEnsembleClassifier, ZipMap; serve it as it is; there is nothing"
    with pytest.raises(ModelError, match=message):
        write_starter(tmp_path / "trees.onnx", tmp_path / "spec.yaml")
    assert not (tmp_path / "spec.yaml").exists()


def test_without_inputs_there_is_nothing_to_compress(tmp_path: Path) -> None:
    guest = network([node("Identity", ["w"], ["y"])], {"w": weight(3, 4)})
    del guest.graph.input[:]
    onnx.save(guest, tmp_path / "constant.onnx")
    with pytest.raises(ModelError, match=r"has no inputs, .*; serve it as it is"):
        write_starter(tmp_path / "constant.onnx", tmp_path / "spec.yaml")


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        (
            ["n", 3, 24, 32],
            guests.FLOAT,
            "`size: [24, 32]`, `layout: channels-first`, `mean` and `std` as in training.\n",
        ),
        (["n", 1, 24, 32], guests.UINT8, "`colour: grey`, `layout: channels-first`.\n"),
        (["n", 24, 32, 3], guests.FLOAT, "`size: [24, 32]`, `mean` and `std` as in training.\n"),
        (["n", 24, 32, 3], guests.UINT8, "`x: image` under inputs, and\n# `size: [24, 32]`.\n"),
        (["n", 5, 24, 32], guests.FLOAT, ""),
        (["n", 3, "h", "w"], guests.FLOAT, ""),
    ],
)
def test_images_by_shape_and_type(
    tmp_path: Path, shape: list[int | str], kind: int, words: str
) -> None:
    nodes = [
        node("Cast", ["x"], ["a"], to=guests.FLOAT),
        node("Flatten", ["a"], ["b"]),
        node("ReduceMax", ["b"], ["y"]),
    ]
    onnx.save(network(nodes, {}, (kind, shape)), tmp_path / "m.onnx")
    write_starter(tmp_path / "m.onnx", tmp_path / "spec.yaml")
    text = (tmp_path / "spec.yaml").read_text()
    assert words in text
    assert bool(words) == ("looks like images of 24 x 32" in text)


def test_weights_are_not_computed(tmp_path: Path) -> None:
    """The passes are tried as a plan tries them."""
    model = linear()
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.full((16, 4), np.nan, np.float32), "w")
    )
    assert started(model, tmp_path, ROWS[:, 0])[0].passes
