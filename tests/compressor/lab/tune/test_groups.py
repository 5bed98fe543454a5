"""Columns that share a scale, and tables of embeddings, as choices of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from compressor.cli.application import application
from compressor.lab.tune import structure
from compressor.lab.tune.options import FLOAT, STORED, bits_of, option_words, rule_of
from compressor.lab.tune.recipe import REMEDIES, Recipe
from compressor.lab.tune.solver import Entry, expected_noise
from tests.compressor.lab.tune.test_tune import found, tuned
from tests.compressor.tiny_project import Project

TOKENS, WIDTH, CLASSES = 64, 128, 4
LOOSE = ("--max-metric-drop", "40", "--rounds", "0")


def reader(folder: Path) -> None:
    """Write a model that looks words up, mixes them and tells their class."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> Any:
        values = random.standard_normal(shape) / np.sqrt(shape[0])
        return numpy_helper.from_array(values.astype(np.float32), name)

    sizes = {"table": (TOKENS, WIDTH), "up": (WIDTH, 256), "down": (256, WIDTH)}
    weights = [weight(name, *shape) for name, shape in sizes.items()]
    weights += [weight("head", WIDTH, CLASSES), numpy_helper.from_array(np.array([1]), "axis")]
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["x"], "look"),
        helper.make_node("MatMul", ["x", "up"], ["u"], "mix"),
        helper.make_node("Relu", ["u"], ["r"]),
        helper.make_node("MatMul", ["r", "down"], ["d"], "part"),
        helper.make_node("ReduceMean", ["d", "axis"], ["m"], keepdims=0),
        helper.make_node("MatMul", ["m", "head"], ["scores"], "tell"),
    ]
    inputs = [helper.make_tensor_value_info("words", TensorProto.INT64, ["batch", 6])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])]
    graph = helper.make_graph(nodes, "reader", inputs, outputs, weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(proto, folder / "reader.onnx")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    kept = tuple(r for r in REMEDIES["quantize-weights"] if r.saves)
    monkeypatch.setitem(REMEDIES, "quantize-weights", kept)
    monkeypatch.setattr(structure, "_SHARES", ())
    reader(tmp_path)
    random = np.random.default_rng(1)
    words = {name: random.integers(0, TOKENS, (256, 6)) for name in ("calib", "test")}
    np.savez(tmp_path / "calib.npz", words=words["calib"])
    np.savez(tmp_path / "test.npz", words=words["test"])
    project = Project(tmp_path, {"onnx": "reader.onnx"})
    data = {"inputs": {"words": "words"}, "batch": 16}
    project.spec["data"] = {
        "calibration": {"npz": "calib.npz", "samples": 64, **data},
        "evaluation": {"npz": "test.npz", **data},
    }
    project.spec["metric"] = "agreement"
    project.spec["passes"] = [{"pass": "quantize-weights", "preset": "int4-g32"}]
    project.spec["exports"] = [{"format": "onnx", "opset": 21}]
    return project


def test_groups_and_tables_are_choices_and_the_answer_is_smaller_than_the_preset(project: Project):
    result = tuned(project, *LOOSE)
    assert result.exit_code == 0, result.stderr
    points = {p["name"]: p for p in found(project)["points"]}
    preset, coarse = points["4 bits"], points["4 bits in groups of 128"]
    assert coarse["bytes"] < 0.8 * preset["bytes"]  # a table of 32 kB, and three scales of four
    assert coarse["sqnr_db"] < preset["sqnr_db"]
    assert "4 bits in groups of 32" not in points  # which it is
    chosen = points[found(project)["chosen"]]
    assert chosen["bytes"] < preset["bytes"]
    output = project.folder / "out" / "tiny-tuned" / "model.onnx"
    proved = output.read_bytes()
    again = CliRunner().invoke(application, ["run", str(project.folder / "tuned.yaml")])
    assert again.exit_code == 0, again.stderr
    assert output.read_bytes() == proved


@pytest.mark.slow
def test_of_a_size_alone_groups_lie_around_it(project: Project):
    tuned(project, *LOOSE)
    points = {p["name"]: p for p in found(project)["points"]}
    ratio = (points["4 bits in groups of 128"]["size_ratio"] + points["4 bits"]["size_ratio"]) / 2
    tuned(project, "--max-size-ratio", str(ratio), "--rounds", "0")
    document = found(project)
    assert "4 bits in groups of 128" in {p["name"] for p in document["points"]}
    chosen = next(p for p in document["points"] if p["name"] == document["chosen"])
    assert chosen["size_ratio"] <= ratio


def test_tables_stay_as_the_user_says(project: Project):
    project.spec["passes"][0]["embeddings"] = False
    tuned(project, *LOOSE)
    assert not any("tables" in p["name"] for p in found(project)["points"])
    del project.spec["passes"][0]["embeddings"]
    project.spec["passes"][0]["layers"] = [{"match": "table", "bits": 2}]
    tuned(project, *LOOSE)
    assert not any("tables" in p["name"] for p in found(project)["points"])


def test_an_option_says_its_bits_its_rule_and_its_words():
    assert [bits_of(o) for o in ("8", "4/32", "4/channel", STORED, FLOAT)] == [8, 4, 4, None, None]
    assert rule_of("4/channel") == {"bits": 4, "group": "channel"}
    assert option_words("2/32") == "2 bits in groups of 32"
    recipe = Recipe(({"pass": "quantize-weights"},), 0).with_choice({"a": "4/32", "b": "4"})
    assert {"match": "a", "bits": 4, "group": 32} in recipe.layers or {
        "match": "*",
        "bits": 4,
        "group": 32,
    } in recipe.layers


def test_noise_of_a_group_that_was_not_measured_is_that_of_the_nearest_width():
    assert expected_noise({"4/32": Entry(16.0, 1.0), FLOAT: Entry(0.0, 9.0)}, "6") == 1.0
