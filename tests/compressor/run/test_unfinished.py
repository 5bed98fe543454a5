"""How the parts of two keys differ, in words."""

from typing import Any

from compressor.run.training import differences

PARTS: dict[str, Any] = {
    "upstream": "a",
    "versions": {"torch": "2.13.0"},
    "name": "finetune",
    "version": 1,
    "options": {"epochs": 3, "learning_rate": 0.1, "prune": {"target": 0.5, "block": [1, 1]}},
    "data": None,
    "batch": None,
    "seed": 0,
    "targets": [],
    "training": {"data": "b", "batch": 32},
    "metric": {"name": "accuracy", "code": ""},
    "ranks": 1,
    "library": {"accelerate": "1.0"},
}


def test_equal_parts():
    assert differences(PARTS, PARTS) == []


def test_options_come_first_and_hashes_are_not_shown():
    other = {
        **PARTS,
        "upstream": "x",
        "versions": {"torch": "2.14.0"},
        "version": 2,
        "options": {"epochs": 5, "learning_rate": 0.1, "prune": None},
        "data": "c",
        "batch": 16,
        "seed": 1,
        "targets": ["tensorrt"],
        "training": {"data": "d", "batch": 64},
        "metric": {"name": "top5", "code": "e"},
        "ranks": 2,
        "library": {"accelerate": "1.1"},
        "models": {"teachers.0": "f"},
        "code": {"m:loss": "g"},
    }
    assert differences(PARTS, other) == [
        "epochs 3, here 5",
        "prune.block [1, 1], here none",
        "prune.target 0.5, here none",
        "data.calibration.batch none, here 16",
        "other code of the user's",
        "other calibration data",
        "accelerate 1.0, here 1.1",
        "other code of the metric",
        "metric accuracy, here top5",
        "another model as teachers.0",
        "processes 1, here 2",
        "seed 0, here 1",
        'targets none, here ["tensorrt"]',
        "data.training.batch 32, here 64",
        "other training data",
        "another model to start from",
        "version of the pass 1, here 2",
        "torch 2.13.0, here 2.14.0",
    ]


def test_options_are_written_as_in_a_spec():
    other = {**PARTS, "options": {**PARTS["options"], "learning_rate": 0.2}}
    assert differences(PARTS, other) == ["learning-rate 0.1, here 0.2"]
