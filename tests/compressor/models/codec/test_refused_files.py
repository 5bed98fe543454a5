"""Directories of a compressed model that are refused: edited, cut, or of another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.errors import ModelError
from compressor.models.codec.load import load
from compressor.models.codec.reading import read_description

Change = Callable[[dict[str, Any]], Any]


def _set(key: str, value: Any) -> Change:
    return lambda document: document.__setitem__(key, value)


def _tensor(name: str, **fields: Any) -> Change:
    return lambda document: document["tensors"][name].update(fields)


def _node(**fields: Any) -> Change:
    """Change the first node, a QuantizeLinear."""
    return lambda document: document["graph"]["graph"]["node"][0].update(fields)


FILE = {
    "name": "value",
    "type": "TENSOR",
    "t": {
        "dims": ["1"],
        "dataType": 1,
        "dataLocation": "EXTERNAL",
        "externalData": [{"key": "location", "value": "/etc/hostname"}],
    },
}


LEAK = {"name": "leak", "opType": "Constant", "output": ["y"], "attribute": [FILE]}


BRANCH = {"name": "then_branch", "type": "GRAPH", "g": {"node": [LEAK]}}


SPARSE = {"name": "sparse_value", "type": "SPARSE_TENSOR", "sparseTensor": {"values": FILE["t"]}}


FILES: list[dict[str, Any]] = [
    {"node": [LEAK]},
    {"node": [{"opType": "If", "attribute": [BRANCH]}]},
    {"node": [{"opType": "Constant", "attribute": [SPARSE]}]},
    {"node": [{"opType": "Constant", "attribute": [{**FILE, "type": "INT"}]}]},
    {
        "node": [
            {"opType": "F", "attribute": [{"name": "b", "graphs": [{"initializer": [FILE["t"]]}]}]}
        ]
    },
    {"attributeProto": [FILE]},
]


def _function(**fields: Any) -> Change:
    """Add a function, and call it in place of the first node."""

    def change(document: Any) -> None:
        graph = document["graph"]
        named = {"name": "Leaks", "domain": "own", "output": ["y"]}
        graph["functions"] = [{**named, "opsetImport": [{"version": "21"}], **fields}]
        graph["opsetImport"].append({"domain": "own", "version": "1"})
        graph["graph"]["node"][0].update(opType="Leaks", domain="own", input=[], attribute=[])

    return change


def _twice(number: int) -> dict[str, Any]:
    call = {"opType": f"F{number + 1}", "input": ["x"]}
    return {"name": f"F{number}", "node": [{**call, "output": [name]} for name in ("t", "y")]}


DOUBLING = [{"name": "QuantizeLinear", "node": [{"opType": "F0"}]}, *map(_twice, range(24))]


EDITS: list[tuple[Change, str]] = [
    (_set("format", "pickle"), "is not a compressed model"),
    (_set("schema", 2), "has schema 2, this version reads 1; export the model again"),
    (_set("schema", None), "has schema None"),
    (_set("tensors", []), "lacks its graph or its tensors"),
    (_set("graph", "x"), "lacks its graph or its tensors"),
    (_set("weights", "../model.safetensors"), "not a file beside it"),
    (_set("weights", 3), "not a file beside it"),
    (_set("weights", "other.safetensors"), "do not exist"),
    (_set("tensors", {}), "not in both"),
    (_set("graph", {"unknown": 1}), "does not hold an ONNX graph"),
    (_set("graph", {"irVersion": [1]}), "does not hold an ONNX graph"),
    (_set("graph", {}), "not in both"),
    (_tensor("first.bias", dtype="float16"), "describes 'first.bias' differently"),
    (_tensor("first.bias", shape=[3]), "describes 'first.bias' differently"),
    (_tensor("first.bias", shape=[-1]), r"'first.bias' the shape \[-1\]"),
    (_tensor("first.bias", shape="512"), "dtype and shape of 'first.bias'"),
    (_tensor("first.bias", dtype="float31"), "dtype and shape of 'first.bias'"),
    (_tensor("first.bias", dtype=["a"]), "dtype and shape of 'first.bias'"),
    (_tensor("first.bias", packed=2), "packs 2 elements of 'first.bias'"),
    (_set("tensors", {"first.bias": 3}), "dtype and shape of 'first.bias'"),
    (_node(opType="Mystery"), "Mystery"),
    (_node(input=["nowhere", "first.input_scale", "first.input_zero_point"]), "nowhere"),
    (
        _node(input=["output", "first.input_scale", "first.input_zero_point"]),
        "nodes that form a cycle",
    ),
    (_node(input=[]), "QuantizeLinear"),
    (_node(attribute=[FILE]), "refers to a file"),
    *((_function(**fields), "refers to a file") for fields in FILES),
    (lambda document: document["graph"].update(functions=DOUBLING), "its functions become"),
    (_node(input="x"), "does not hold an ONNX graph"),
    (_node(attribute=[{"name": "axis", "type": "GRAPH"}]), "axis"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_an_edited_description_is_refused(saved: Path, edit: Change, message: str) -> None:
    path = saved / "model.json"
    document = json.loads(path.read_bytes())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError):
        load(saved)
    weights = saved / "model.safetensors"
    save_file(load_file(weights), weights)  # without the description's hash
    with pytest.raises(ModelError, match=message):
        load(saved)


def test_nodes_may_stand_in_any_order(saved: Path) -> None:
    x = torch.ones(2, 64)
    expected = load(saved)(x)["output"]
    path, weights = saved / "model.json", saved / "model.safetensors"
    document = json.loads(path.read_bytes())
    document["graph"]["graph"]["node"].reverse()
    path.write_text(json.dumps(document))
    save_file(load_file(weights), weights)  # without the description's hash
    assert torch.equal(load(saved)(x)["output"], expected)
    read_description(path).model().clone()  # which a graph out of order refuses


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": "compressor"', "\xff"])
def test_a_description_that_is_not_one(saved: Path, text: str) -> None:
    (saved / "model.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"model\.json"):
        load(saved)


def test_missing_files(saved: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; give a directory"):
        load(saved / "elsewhere")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"do not exist; copy the file beside model\.json"):
        load(saved)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_cut_weights(saved: Path, keep: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="the file is truncated or damaged; copy it again"):
        load(saved)


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["first.bias"]


def _reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["first.bias"] = tensors["first.bias"].reshape(2, -1)


def _retyped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["first.bias"] = tensors["first.bias"].to(torch.int32)


def _extended(tensors: dict[str, torch.Tensor]) -> None:
    tensors["third.bias"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without, "lack the tensor 'first.bias'"),
        (_reshaped, r"hold 'first.bias' as F32\[2, 256\], not F32\[512\]"),
        (_retyped, r"hold 'first.bias' as I32\[512\], not F32\[512\]"),
        (_extended, "hold 'third.bias', which the model does not have"),
    ],
)
def test_weights_of_another_model(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        load(saved)
