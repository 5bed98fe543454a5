"""Text to search on: it has the answers of a language model in itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from ruamel.yaml import YAML
from tokenizers import Tokenizer, models, pre_tokenizers

from compressor.lab.tune.search_data import search_data
from compressor.run.plan import make_plan
from compressor.spec.load import load_spec

TOKENS, LENGTH = 32, 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Hold a model of the next token, its tokenizer and text."""
    random = np.random.default_rng(0)
    shapes = {"table": (TOKENS, 16), "mix": (16, 16), "head": (16, TOKENS)}
    weights = [
        numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"], "look"),
        helper.make_node("MatMul", ["x", "mix"], ["y"], "mix"),
        helper.make_node("MatMul", ["y", "head"], ["logits"], "tell"),
    ]
    tokens = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", LENGTH])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", LENGTH, TOKENS])
    graph = helper.make_graph(nodes, "next", [tokens], [logits], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(proto, tmp_path / "next.onnx")
    words = {f"w{i}": i for i in range(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, count in (("train", 400), ("held", 40)):
        text = " ".join(f"w{i}" for i in random.integers(0, TOKENS, count * LENGTH))
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("keys", [{}, {"inputs": {"input_ids": "input_ids"}}], ids=["all", "named"])
@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (64, "samples 65 to 399 of the calibration source"),
        (320, "the last 80 of 320 calibration samples, which do not calibrate"),
    ],
)
def test_samples_have_the_inputs_and_the_tokens_that_follow(
    folder: Path, keys: dict[str, Any], samples: int, words: str
):
    text = {"tokenizer": "tokenizer.json", "length": LENGTH, "batch": 4}
    spec = {
        "version": 1,
        "name": "next",
        "model": {"onnx": "next.onnx"},
        "data": {
            "calibration": {"text": "train.txt", **text, **keys, "samples": samples},
            "evaluation": {"text": "held.txt", **text, "target": "labels"},
        },
        "metric": "perplexity",
        "passes": [{"pass": "quantize-weights", "method": "rtn", "bits": 4}],
        "exports": [{"format": "onnx"}],
    }
    with (folder / "spec.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump(spec, stream)
    found = search_data(make_plan(load_spec(folder / "spec.yaml")))
    assert found.same
    assert found.words == words
    first = next(iter(found.parts[0].batches()))
    assert {"input_ids", "labels"} <= first.keys()
    np.testing.assert_array_equal(first["input_ids"][:, 1:], first["labels"][:, :-1])
