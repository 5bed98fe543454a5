"""Inputs: declared, agreed, filled."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from compressor.errors import CompressorError, ExitCode
from compressor.lab.bench.bench import parse_shapes
from compressor.lab.bench.finding import find_artifacts
from compressor.lab.bench.inputs import (
    agreed,
    batch_sizes,
    declared,
    fixed_shapes,
    random_inputs,
    stored_inputs,
    undeclared,
)
from compressor.types.tensors import TensorSpec
from tests.compressor.lab.bench.conftest import SaveOnnx
from tests.compressor.tiny_project import Project

IMAGE = TensorSpec("image", ("n", 3, 8, 8), "float32")
TOKENS = TensorSpec("ids", ("n", "length"), "int64")


def test_every_format_declares_the_same_inputs(on_onnx: Project):
    on_onnx.spec["exports"] = [{"format": f} for f in ("onnx", "safetensors", "archive")]
    on_onnx.run()
    said = {a.format: declared(a).inputs for a in find_artifacts([on_onnx.output])}
    assert set(said) == {"onnx", "safetensors", "archive"}
    assert {s[0].name for s in said.values() if s} == {"image"}
    assert fixed_shapes(agreed({k: v for k, v in said.items() if v}), {}) == (
        TensorSpec("image", ("batch", 1, 8, 8), "float32"),
    )


def test_lengths_that_one_fixes_are_fixed_for_all(save: SaveOnnx):
    paths = [save("a.onnx", ("n", "m")), save("b.onnx", ("batch", 5))]
    said = {a.name: declared(a).inputs or () for a in find_artifacts(paths)}
    assert agreed(said)[0].shape == ("n", 5)


@pytest.mark.parametrize(
    "other",
    [
        {"takes": "z"},
        {"shape": ("n", 4)},
        {"shape": ("n", 3, 1)},
        {"dtype": TensorProto.FLOAT16},
    ],
)
def test_artifacts_of_different_inputs_are_not_compared(save: SaveOnnx, other: dict[str, object]):
    paths = [save("a.onnx"), save("b.onnx", **other)]
    said = {a.path.name: declared(a).inputs or () for a in find_artifacts(paths)}
    with pytest.raises(CompressorError, match="compare artifacts of one model") as caught:
        agreed(said)
    assert "artifact 'b.onnx': takes" in str(caught.value)
    assert "and 'a.onnx' takes x float32[batch, 3]" in str(caught.value)


def test_free_lengths_come_from_the_option():
    with pytest.raises(CompressorError) as caught:
        fixed_shapes([IMAGE, TOKENS], {})
    assert str(caught.value) == (
        "input ids int64[n, length]: has an unknown length; give --shape ids=1,1, "
        "or --data FILE.npz"
    )
    with pytest.raises(CompressorError, match="give --shape page=1,3,224,224"):
        fixed_shapes([TensorSpec("page", ("n", 3, "h", "w"), "float32")], {})
    fixed = fixed_shapes([IMAGE, TOKENS], parse_shapes(["ids=1,128"]))
    assert [s.shape for s in fixed] == [("batch", 3, 8, 8), ("batch", 128)]
    assert batch_sizes(fixed, []) == (1,)
    assert batch_sizes(fixed, [8, 1, 8]) == (8, 1)
    batch = random_inputs(fixed, 8)[0]
    assert {n: a.shape for n, a in batch.items()} == {"image": (8, 3, 8, 8), "ids": (8, 128)}
    assert set(np.unique(batch["ids"])) == {0, 1}
    np.testing.assert_array_equal(batch["image"], random_inputs(fixed, 8)[0]["image"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ids", "is not a name followed by lengths of at least 1; write it as in --shape"),
        ("=1,2", "is not a name followed by lengths"),
        ("ids=1,x", "is not a name followed by lengths"),
        ("ids=0,4", "is not a name followed by lengths"),
        (
            "ids=1,4,4",
            "--shape ids=1,4,4: has 3 lengths, and ids int64[n, length] takes 2, samples first; "
            "give --shape ids=1,1",
        ),
        ("image=1,3,9,8", "--shape image=1,3,9,8: does not fit image float32[n, 3, 8, 8]"),
        ("audio=1,3", "--shape audio: is not an input; inputs are: image float32[n, 3, 8, 8], ids"),
    ],
)
def test_bad_shapes(text: str, message: str):
    with pytest.raises(CompressorError) as caught:
        fixed_shapes([IMAGE, TOKENS], {"ids": (1, 4), **parse_shapes([text])})
    assert message in str(caught.value)
    assert caught.value.exit_code == ExitCode.BAD_SPEC


def test_a_fixed_batch_is_the_only_one():
    fixed = fixed_shapes([TensorSpec("x", (4, 3), "float32")], {})
    assert batch_sizes(fixed, []) == batch_sizes(fixed, [4]) == (4,)
    with pytest.raises(CompressorError, match="--batch 2: is not what the artifacts take"):
        batch_sizes(fixed, [2])


def test_formats_that_say_nothing_need_a_shape():
    with pytest.raises(CompressorError, match="does not say which inputs it takes"):
        undeclared("model.engine", {})
    assert undeclared("model.engine", {"x": (1, 3)}) == (TensorSpec("x", ("batch", 3), "float32"),)


def test_a_type_that_is_no_number():
    with pytest.raises(CompressorError, match="input 'text': is of type object"):
        fixed_shapes([TensorSpec("text", (1,), "object")], {})


def test_samples_from_a_file(tmp_path: Path):
    path, inputs = tmp_path / "data.npz", fixed_shapes([IMAGE], {})
    images = np.random.default_rng(0).standard_normal((5, 3, 8, 8)).astype(np.float32)
    np.savez(path, image=images, label=np.arange(5))
    batches = stored_inputs(path, inputs, 1, several=True)
    np.testing.assert_array_equal(np.concatenate([b["image"] for b in batches]), images)
    assert len(stored_inputs(path, inputs, 2, several=True)) == 2
    (repeated,) = stored_inputs(path, inputs, 8, several=False)
    np.testing.assert_array_equal(repeated["image"], np.concatenate([images, images[:3]]))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones(3, np.float32)}, "has no array 'image'; it has 'x'"),
        ({"image": np.ones((0, 3, 8, 8), np.float32)}, "array 'image' is empty"),
        (
            {"image": np.ones((2, 3, 8, 8))},
            "the model expects float32; convert the array",
        ),
        ({"image": np.ones((2, 3, 8), np.float32)}, "array 'image': shape is [1, 3, 8], the model"),
    ],
)
def test_files_that_hold_something_else(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path
):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    with pytest.raises(CompressorError) as caught:
        stored_inputs(path, fixed_shapes([IMAGE], {}), 1, several=False)
    assert message in str(caught.value)
    assert "data.npz" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    inputs = fixed_shapes([IMAGE], {})
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(CompressorError, match="cannot be read") as caught:
        stored_inputs(tmp_path / "cut.npz", inputs, 1, several=False)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    with pytest.raises(CompressorError, match="does not exist; correct the path"):
        stored_inputs(tmp_path / "none.npz", inputs, 1, several=False)
