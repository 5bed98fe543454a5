"""Close names, lists in messages, and rules for layers."""

import pytest

from compressor.errors import (
    ArtifactError,
    CompressorError,
    ExitCode,
    ModelError,
    SpecError,
    close_names,
    listed,
    suggestion,
)
from compressor.types.layer_rules import resolve_rules
from compressor.types.passes import LayerRule

LAYERS = ["stem", "layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "fc"]


def rule(match: str, *, skip: bool = False) -> LayerRule:
    return LayerRule(match=match, skip=skip)


def test_the_first_rule_that_matches_wins():
    rules = [rule("layer1.0.*", skip=True), rule("*conv1"), rule("f?")]
    found = resolve_rules(rules, LAYERS)
    assert list(found) == LAYERS
    assert [None if r is None else r.match for r in found.values()] == [
        None,
        "layer1.0.*",
        "layer1.0.*",
        "*conv1",
        "f?",
    ]


def test_a_rule_that_others_hide_is_no_error():
    assert resolve_rules([rule("*"), rule("fc")], LAYERS)["fc"] == rule("*")


def test_matching_minds_case_and_the_whole_name():
    for wrong in ("FC", "conv1", "layer1.0"):
        with pytest.raises(SpecError, match="matches no layer"):
            resolve_rules([rule(wrong)], LAYERS)


def test_a_rule_that_matches_nothing_names_the_nearest_layer():
    with pytest.raises(SpecError) as caught:
        resolve_rules([rule("*"), rule("layer1.0.conv3")], LAYERS)
    assert str(caught.value) == (
        "layer rule 'layer1.0.conv3': matches no layer; did you mean 'layer1.0.conv2'?"
    )
    assert caught.value.exit_code is ExitCode.BAD_SPEC


def test_rules_on_a_model_without_layers():
    assert resolve_rules([], []) == {}
    with pytest.raises(SpecError, match="there is: nothing"):
        resolve_rules([rule("*")], [])


def test_suggestions():
    assert suggestion("epoch", ["epochs", "batch"]) == "did you mean 'epochs'?"
    assert suggestion("zzz", ["b", "a"]) == "there is: a, b"
    many = [f"name{i:02}" for i in range(20)]
    assert suggestion("?", many) == "there is: " + ", ".join(many[:12]) + " ..."
    assert close_names("conv1", ["conv2", "fc", "conv1.0"]) == ["conv1.0", "conv2"]


def test_long_lists_are_cut():
    assert listed(["a"]) == "'a'"
    assert listed(list("abcde")) == "'a', 'b', 'c', 'd', 'e'"
    assert listed(list("abcdefg")) == "'a', 'b', 'c', 'd', 'e' and 2 more"


def test_messages_have_place_subject_problem_and_remedy():
    error = SpecError("layer 'fc'", "100 columns do not divide into groups of 64", "skip it")
    assert str(error) == "layer 'fc': 100 columns do not divide into groups of 64; skip it"
    assert error.at("spec.yaml:3") is error
    assert str(error).startswith("spec.yaml:3: layer 'fc': ")
    assert str(error.at("elsewhere:1")).startswith("spec.yaml:3: ")


def test_exit_codes_are_those_that_scripts_depend_on():
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 130]
    for kind, code in ((SpecError, 2), (ModelError, 3), (ArtifactError, 4)):
        assert issubclass(kind, CompressorError)
        assert kind("a", "b", "c").exit_code == code
