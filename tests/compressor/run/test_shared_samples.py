"""Data that both calibrate and judge are noticed."""

from typing import Any

import pytest
import torch

from compressor import Spec
from compressor.front.spec import checked
from compressor.run.shared_samples import judged_on_calibration
from compressor.spec.load import load_spec
from tests.compressor.tiny_project import Project, tiny_module

STATIC = [{"pass": "quantize-static"}]


@pytest.mark.parametrize(
    ("changes", "doubted"),
    [
        ({}, True),
        ({"target": "label", "samples": 8}, True),
        ({"fold": "1/2"}, True),
        ({"inputs": {"image": "other"}}, False),
        ({"npz": "test.npz"}, False),
    ],
)
def test_one_file_for_both(on_onnx: Project, changes: dict[str, Any], doubted: bool):
    data = on_onnx.spec["data"]
    data["calibration"] = {"npz": "calib.npz", "inputs": {"image": "image"}}
    data["evaluation"] = {**data["calibration"], **changes}
    on_onnx.spec["metric"] = "cosine"
    assert bool(judged_on_calibration(load_spec(on_onnx.path), calibrates=True)) is doubted
    assert not judged_on_calibration(load_spec(on_onnx.path), calibrates=False)


@pytest.mark.parametrize(
    ("folds", "doubted"),
    [
        (("1/2", "2/2"), False),
        (("1/2", "2/4"), False),
        (("1/2", "3/4"), True),
        (("1/2", "1/3"), True),
    ],
)
def test_folds_may_share_no_sample(on_onnx: Project, folds: tuple[str, str], doubted: bool):
    one = {"npz": "calib.npz", "inputs": {"image": "image"}}
    on_onnx.spec["data"] = {
        role: {**one, "fold": fold}
        for role, fold in zip(("calibration", "evaluation"), folds, strict=True)
    }
    assert bool(judged_on_calibration(load_spec(on_onnx.path), calibrates=True)) is doubted


def test_one_loader_for_both():
    images = torch.zeros(8, 1, 8, 8)
    for other, doubted in ((images, True), (images.clone(), False)):
        spec = Spec(
            name="both",
            model=tiny_module(),
            data={"calibration": {"factory": images, "samples": 4}, "evaluation": other},
            passes=STATIC,
            exports=[{"format": "onnx"}],
        )
        assert bool(judged_on_calibration(checked(spec), calibrates=True)) is doubted
