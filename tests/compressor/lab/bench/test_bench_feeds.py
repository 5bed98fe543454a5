"""Models whose inputs have no sample axis are timed on whole feeds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from compressor.cli.application import application
from compressor.report.run import run_spec
from compressor.spec.load import load_spec
from tests.compressor.lab.bench.conftest import SaveOnnx

SHORT = ("--no-cold", "--json", "--seconds", 5, "--precision", 1)
NODES = (5, 7, 6)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(application, ["bench", *(str(a) for a in (*arguments, *SHORT))])


def document(*arguments: object) -> Any:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """A run of a network of graphs ``[nodes, 3]`` with edges ``[2, count]``, and its feeds."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "edges"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, ["n", 3]), value("edges", TensorProto.INT64, [2, "count"])],
        [value("y", TensorProto.FLOAT, [2, "count", 3])],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "g.onnx")
    (tmp_path / "feeds").mkdir()
    for i, nodes in enumerate(NODES):
        arrays = {"nodes": np.ones((nodes, 3), np.float32), "edges": np.full((2, 4), nodes - 1)}
        np.savez(tmp_path / f"feeds/{i}.npz", **arrays)
    spec = {
        "version": 1,
        "name": "graphs",
        "model": {"onnx": "g.onnx"},
        "data": {
            "evaluation": {
                "npz": "feeds",
                "samples": "feeds",
                "inputs": {"x": "nodes", "edges": "edges"},
            }
        },
        "metric": "cosine",
        "passes": [{"pass": "fuse"}],
        "exports": [{"format": "onnx"}],
        "limits": {"size-ratio": None, "latency-ratio": None},
    }
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    run_spec(load_spec(tmp_path / "spec.yaml"))
    return tmp_path / "out" / "graphs"


def test_a_run_is_timed_on_its_own_feeds(graphs: Path, quick: None):
    found = document(graphs)
    assert found["data"] == "feeds of the run"
    assert found["artifacts"][0]["latency"][0]["inputs"] == len(NODES)  # they differ in shape
    assert found["inputs"][0]["shape"] == ["n", 3]
    assert found["inputs"][1]["shape"] == [2, 4]


def test_feeds_that_moved_are_an_error(graphs: Path, quick: None):
    feeds = graphs.parent.parent / "feeds"
    feeds.rename(feeds.with_name("moved"))
    result = invoke(graphs)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_a_feed_has_the_lengths_that_inputs_leave_open(graphs: Path, tmp_path: Path, quick: None):
    feed = tmp_path / "feed.npz"
    np.savez(feed, x=np.ones((9, 3), np.float32), edges=np.full((2, 6), 8))
    found = document(graphs / "model.onnx", "--data", feed)
    assert [i["shape"] for i in found["inputs"]] == [[9, 3], [2, 6]]
    assert found["data"] == "feed.npz"
    refused = invoke(graphs, "--data", feed, "--shape", "edges=2,7")
    assert "array 'edges': shape is [2, 6], the model expects edges int64[2, 7]" in refused.stderr


def test_samples_have_the_lengths_that_inputs_leave_open(
    save: SaveOnnx, tmp_path: Path, quick: None
):
    np.savez(tmp_path / "x.npz", x=np.ones((4, 6), np.float32))
    path = save(shape=("n", "length"))
    found = document(path, "--data", tmp_path / "x.npz", "--batch", 2)
    assert found["inputs"][0]["shape"] == ["batch", 6]


def test_without_feeds_the_error_names_them(graphs: Path):
    result = invoke(graphs / "model.onnx")
    assert result.exit_code == 2
    assert "give --shape edges=2,1, or --data FILE.npz" in result.stderr
