"""Starter specs of models whose arrays have another form: init writes the code that they need."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto
from PIL import Image
from ruamel.yaml import YAML
from torch import nn

from compressor.cli.application import application
from compressor.errors import DataError, SpecError
from compressor.lab.found_data import look_at
from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.lab.starter_levels import IMAGENET
from compressor.lab.tune.from_model import spec_of_model
from tests.compressor.lab.test_starter_data import planned, save_net

LEVELS = np.arange(4 * 6 * 5 * 3, dtype=np.uint8).reshape(4, 6, 5, 3)
MEAN, STD = (np.array([float(x) for x in text[1:-1].split(",")]) for text in IMAGENET)


def given(folder: Path, array: np.ndarray, shape: tuple[int | str, ...], dtype: int = 1):
    """Return what the model is given of the first two samples, by the spec that init wrote."""
    np.save(folder / "all.npy", array)
    plan = planned(save_net(folder / "m.onnx", shape, dtype), Choices(folder / "all.npy"))
    assert plan.data["calibration"].samples == plan.data["evaluation"].samples == 2
    return plan.data["calibration"].first(2)["x"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stored_first", [True, False])
def test_pixels_in_colour_are_scaled_and_moved(tmp_path, first, stored_first):
    """init wrote a spec that `compress plan` refused until a transform was set."""
    stored = LEVELS.transpose(0, 3, 1, 2) if stored_first else LEVELS
    x = given(tmp_path, stored, ("batch", 3, 6, 5) if first else ("batch", 6, 5, 3))
    expected = (LEVELS[::2] / 255 - MEAN) / STD
    assert x.dtype == np.float32
    np.testing.assert_allclose(x.transpose(0, 2, 3, 1) if first else x, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("stored", "shape"),
    [
        (LEVELS[..., 0], ("batch", 1, 6, 5)),
        (LEVELS[..., 0], ("batch", 6, 5, 1)),
        (LEVELS[..., :1], ("batch", 1, 6, 5)),
        (LEVELS[..., 0].reshape(4, 30), ("batch", 30)),
        (LEVELS[..., 0], (2, 1, 6, 5)),
    ],
)
def test_levels_of_one_channel_are_scaled_to_one(tmp_path, stored, shape):
    x = given(tmp_path, stored, shape)
    assert list(x.shape) == [2, *shape[1:]]
    np.testing.assert_allclose(x.reshape(2, -1), LEVELS[::2, ..., 0].reshape(2, -1) / 255)


@pytest.mark.parametrize("stored", [LEVELS, LEVELS[..., 0], LEVELS.astype(np.float32)])
def test_arrays_of_another_size_are_marked(tmp_path, stored):
    """init wrote a spec without a word on it, which plan refused."""
    model = save_net(tmp_path / "m.onnx", ("batch", 3, 8, 8))
    np.savez(tmp_path / "all.npz", a=stored)
    write_starter(model, tmp_path / "spec.yaml", Choices(tmp_path / "all.npz"))
    line = f"      x: a # CHECK: {stored.dtype} {list(stored.shape)} needs a transform\n"
    assert (tmp_path / "spec.yaml").read_text().count(line) == 2


@pytest.mark.parametrize("shape", [("batch", 3, 8, 6), ("batch", 8, 6, 3), ("batch", 3, "h", 8)])
def test_a_preprocessor_of_another_size_is_marked(tmp_path, shape):
    values = {"image_processor_type": "ViTImageProcessor", "size": {"height": 4, "width": 4}}
    values |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    (tmp_path / "images").mkdir()
    for name in "ab":
        Image.new("RGB", (5, 9)).save(tmp_path / "images" / f"{name}.png")
    plan = planned(save_net(tmp_path / "m.onnx", shape), Choices(tmp_path / "images"))
    wanted = [side if isinstance(side, int) else 4 for side in shape[1:]]
    assert plan.data["evaluation"].first(1)["x"].shape == (1, *wanted)
    text = (tmp_path / "specs" / "spec.yaml").read_text()
    assert "# CHECK: the model's; preprocessor_config.json has [4, 4]\n" in text


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (np.arange(12.0).reshape(4, 3), TensorProto.FLOAT),
        (np.arange(12, dtype=np.int64).reshape(4, 3), TensorProto.INT32),
    ],
)
def test_numbers_of_another_width_are_converted(tmp_path, stored, dtype):
    x = given(tmp_path, stored, ("batch", 3), dtype)
    np.testing.assert_array_equal(x, stored[::2])
    assert "CHECK" not in (tmp_path / "specs" / "spec_data.py").read_text()


def test_what_cannot_be_seen_is_left_to_the_plan(tmp_path):
    with pytest.raises(DataError, match="convert it in a transform"):
        given(tmp_path, np.zeros((4, 3), np.int64), ("batch", 3))
    assert not (tmp_path / "specs" / "spec_data.py").exists()


def test_init_says_which_line_to_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("all.npz", x=LEVELS)
    save_net(Path("m.onnx"), ("batch", 3, 6, 5))
    command = ["init", "m.onnx", "--data", "all.npz"]
    result = CliRunner().invoke(application, command)
    assert "spec_data.py: MEAN, STD = " in result.stderr
    assert "wrote spec.yaml and spec_data.py; check it" in result.stderr
    Path("spec.yaml").unlink()
    with pytest.raises(SpecError, match=r"spec_data\.py'?: exists already"):
        write_starter(Path("m.onnx"), Path("spec.yaml"), Choices(Path("all.npz")))
    assert not Path("spec.yaml").exists()


def test_a_checkpoints_input_is_that_of_the_arrays(tmp_path):
    import torch

    torch.save({"w": torch.zeros(2, 2)}, tmp_path / "m.pt")
    np.savez(tmp_path / "all.npz", x=LEVELS, y=np.arange(4))
    write_starter(tmp_path / "m.pt", tmp_path / "spec.yaml", Choices(tmp_path / "all.npz"))
    text = (tmp_path / "spec.yaml").read_text()
    assert "    image: {shape: [batch, 3, 6, 5], dtype: float32}\n" in text
    assert text.count("    transform: spec_data:prepare\n") == 2


def test_tune_asks_for_a_spec_where_arrays_need_a_transform(tmp_path):
    np.save(tmp_path / "all.npy", LEVELS)
    model = save_net(tmp_path / "m.onnx", ("batch", 3, 6, 5))
    with pytest.raises(SpecError, match=r"needs a transform of the arrays.*compress init"):
        spec_of_model(model, tmp_path / "all.npy", None, tmp_path)


def test_a_checkpoint_takes_each_of_several_arrays(tmp_path: Path):
    """init wrote an input that the file lacks, and nothing said so."""
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "pair.pt")
    np.savez(
        tmp_path / "pairs.npz",
        left=np.zeros((8, 3), np.float32),
        right=np.zeros((8, 4, 5), np.float32),
        label=np.zeros(8, np.int64),
        weight=np.zeros(8, np.float32),
    )
    written = tmp_path / "spec.yaml"
    write_starter(tmp_path / "pair.pt", written, Choices(tmp_path / "pairs.npz"))
    document = YAML(typ="safe").load(written)
    assert {name: x["shape"] for name, x in document["model"]["inputs"].items()} == {
        "left": ["batch", 3],
        "right": ["batch", 4, 5],
    }
    for part in document["data"].values():
        assert part["inputs"] == {"left": "left", "right": "right"}
    (doubt,) = (line for line in written.read_text().splitlines() if "an input, too?" in line)
    assert doubt.strip().startswith("# weight: {shape: [batch], dtype: float32} # CHECK")


@pytest.mark.parametrize("parts", [("train", "test"), ()])
def test_a_folder_of_npy_files_holds_an_array_in_each(tmp_path, parts):
    for part in parts or ("",):
        (tmp_path / "arrays" / part).mkdir(parents=True)
        samples = {"train": 6, "test": 4}.get(part, 10)
        np.save(tmp_path / "arrays" / part / "x.npy", np.zeros((samples, 5), np.float32))
        np.save(tmp_path / "arrays" / part / "y.npy", np.arange(samples) % 3)
    plan = planned(save_net(tmp_path / "m.onnx", ("batch", 5)), Choices(tmp_path / "arrays"))
    counts = {role: data.samples for role, data in plan.data.items()}
    assert counts == (
        {"calibration": 6, "evaluation": 4} if parts else {"calibration": 5, "evaluation": 5}
    )
    assert plan.spec.data["evaluation"].keys.target == "y"
    assert look_at(tmp_path / "arrays").words() == "a folder of npy"


@pytest.mark.parametrize(("shape", "fits"), [((7, 1, 4), True), ((7, 1, 5), False)])
def test_a_sequence_has_its_steps_as_one_more_axis(
    shape: tuple[int, ...], fits: bool, tmp_path: Path
):
    """Such arrays are what docs/feeds.md describes, and init asked for a transform."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 4] x, float[1, 4] h) => '
    text += "(float[1, 4] y, float[1, 4] h_next) { h_next = Add(x, h) y = Tanh(h_next) }"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    for index in range(4):
        np.savez(tmp_path / "data" / f"{index}.npz", x=np.zeros(shape, np.float32))
    written = tmp_path / "spec.yaml"
    write_starter(tmp_path / "m.onnx", written, Choices(tmp_path / "data"))
    text = written.read_text()
    assert "state: {h: h_next}" in text
    assert ("needs a transform" not in text) is fits
