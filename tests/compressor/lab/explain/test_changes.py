"""Rules for single layers, as the lines of a spec."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from compressor import catalog
from compressor.lab.explain import by_sqnr
from compressor.lab.explain.by_sqnr import FinishedRun
from compressor.lab.explain.explanation import Change, change_for
from compressor.types.layer_rules import resolve_rules, rule_class
from compressor.types.passes import LayerRule

names = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\ufeff"), min_size=1
)


@given(names, names)
def test_a_line_means_its_layer_and_no_other(layer: str, other: str):
    (rule,) = YAML(typ="safe").load(Change(0, layer, {"skip": True}).line)
    found = resolve_rules([LayerRule.model_validate(rule)], [layer, other])
    assert found[layer] is not None
    assert found[layer].skip
    assert (found[other] is None) == (other != layer)


@pytest.mark.parametrize("name", ["null", "1.5", "on", "features.0", "a*[b]?", "- x: #"])
def test_names_that_mean_something_in_yaml(name: str):
    (rule,) = YAML(typ="safe").load(Change(0, name, {"skip": True}).line)
    assert isinstance(rule["match"], str)
    assert resolve_rules([LayerRule.model_validate(rule)], [name])[name] is not None


@pytest.mark.parametrize(
    ("name", "scheme", "keys"),
    [
        ("quantize-static", "int8/channel", {"skip": True}),
        ("quantize-static", "int4/channel", {"bits": 8}),
        ("quantize-weights", "uint4/group 32 asym", {"bits": 8}),
        ("quantize-weights", "nvfp4/group 16", {"skip": True}),
        ("prune-magnitude", "float32", {"skip": True}),
    ],
)
def test_more_bits_where_there_are_fewer_than_eight(
    name: str, scheme: str, keys: dict[str, object]
):
    options = {"sparsity": 0.5} if name == "prune-magnitude" else {}
    change = change_for(1, catalog.load("pass", name)(**options), "fc", scheme)
    assert change.keys == keys
    assert change.kept == (4.0**-4 if "bits" in keys else 0.0)


@pytest.mark.parametrize(
    ("name", "weights", "inputs", "rule", "keys"),
    [
        ("quantize-static", 4, 4, None, {"bits": 8, "activation-bits": 8}),
        ("quantize-static", 8, 4, None, {"activation-bits": 8}),
        ("quantize-static", 4, 4, 8, {"bits": 8}),
        ("quantize-static", 8, 8, 4, {"activation-bits": 8}),
        ("quantize-static", 8, 8, None, {"skip": True}),
        ("qat", 2, 4, None, {"bits": 8, "activation-bits": 8}),
    ],
)
def test_what_a_layer_reads_gets_eight_bits_with_its_weight(
    name: str, weights: int, inputs: int, rule: int | None, keys: dict[str, object]
):
    rules = () if rule is None else ({"match": "f*", "activation-bits": rule},)
    declared = catalog.load("pass", name).model_validate(
        {"activations": {"bits": inputs}, "layers": rules}
    )
    change = change_for(0, declared, "fc", f"int{weights}/channel")
    assert change.keys == keys
    assert change.kept == (0.0 if "skip" in keys else 4.0 ** (min(weights, rule or inputs) - 8))
    first = change.applied(declared).layers[0]
    assert (first.bits, first.activation_bits) == (keys.get("bits"), keys.get("activation-bits"))


def test_a_layer_that_must_be_like_the_others_is_left_out():
    declared = catalog.load("pass", "quantize-weights")(preset="int2-g32")
    scheme = "uint2/group 32 asym"
    assert change_for(0, declared, "fc", scheme).keys == {"bits": 8}
    change = change_for(0, declared, "fc", scheme, alike=True)
    assert (change.keys, change.kept) == ({"skip": True}, 0.0)


@pytest.mark.parametrize(
    ("model", "scheme", "alone"),
    [
        ({"checkpoint": "d", "factory": None, "onnx": None}, "uint2/group 32 asym", True),
        ({"checkpoint": "d", "factory": None, "onnx": None}, "int2/group 32", False),
        ({"checkpoint": "w.pt", "factory": "m:f", "onnx": None}, "uint2/group 32 asym", False),
        ({"checkpoint": None, "factory": None, "onnx": "m.onnx"}, "uint8/tensor asym", False),
    ],
)
def test_zero_points_stand_alone_in_a_directory(
    model: dict[str, str | None], scheme: str, alone: bool
):
    manifest = {"spec": {"model": model}, "spec_file": "spec.yaml"}
    assert by_sqnr._alone(FinishedRun(Path(), {}, manifest, None), scheme) == alone


def test_a_rule_stands_in_front_of_the_others():
    declared = catalog.load("pass", "quantize-static").model_validate(
        {"layers": ({"match": "*", "bits": 4},)}
    )
    changed = Change(0, "fc", {"bits": 8}).applied(declared)
    assert [(rule.match, rule.bits) for rule in changed.layers] == [("fc", 8), ("*", 4)]
    assert [rule.match for rule in declared.layers] == ["*"]
    assert changed == type(declared).model_validate(
        {"layers": ({"match": "fc", "bits": 8}, {"match": "*", "bits": 4})}
    )


def test_passes_without_rules():
    assert rule_class(catalog.load("pass", "fuse")) is None
    assert rule_class(catalog.load("pass", "prune-magnitude")) is not None
