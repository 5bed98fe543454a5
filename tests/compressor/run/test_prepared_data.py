"""Planning: files in folders that the spec, or the model's own file, says how to prepare."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compressor.errors import DataError, SpecError
from compressor.report.pages.plan import plan_json
from tests.compressor.tiny_project import SIDE, Project

GREY = {"resize": [SIDE, SIDE], "colour": "grey", "layout": "channels-first", "scale": 1}


@pytest.fixture
def photos(on_onnx: Project) -> Path:
    folder = on_onnx.folder / "photos"
    for label, name in enumerate(("ant", "bee")):
        (folder / name).mkdir(parents=True)
        for index in range(3):
            image = Image.new("RGB", (20, 12), (40 * index, 80 * label, 7))
            image.save(folder / name / f"{index}.png")
    return folder


def images(project: Project, **options: Any) -> Project:
    source = {"images": "photos", "inputs": {"image": "image"}, **options}
    project.spec["data"] = {"evaluation": source | {"target": "label"}}
    return project


def test_class_folders_need_no_python_file(on_onnx: Project, photos: Path):
    plan = images(on_onnx, **GREY).plan()
    batch = plan.data["evaluation"].first(6)
    assert batch["image"].shape == (6, 1, SIDE, SIDE)
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    assert plan_json(plan)["prepared"] == {
        "evaluation": f"resize to {SIDE} x {SIDE} (bilinear), grey, multiply by 1, "
        "channels-first; 2 classes: 'ant', 'bee'"
    }


def test_the_file_beside_the_model_is_read(on_onnx: Project, photos: Path):
    value = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "image_mean": [0.5],
        "image_std": [0.5],
    }
    place = on_onnx.folder / "preprocessor_config.json"
    place.write_text(json.dumps(value), encoding="utf-8")
    plan = images(on_onnx, colour="grey").plan()
    assert f"as {place} has it" in plan_json(plan)["prepared"]["evaluation"]
    made = plan.data["evaluation"].first(1)["image"]
    levels = np.round((made * 0.5 + 0.5) * 255)
    np.testing.assert_allclose(made, (levels / 255 - 0.5) / 0.5, atol=1e-6)
    # What the spec says about sizes is not mixed with the file.
    with pytest.raises(DataError, match="set layout: channels-first and mean and std"):
        images(on_onnx, size=[SIDE, SIDE], colour="grey").plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "images may differ in size; give size, or resize and crop, or preprocessor"),
        ({"resize": 9}, r"sizes differ; add crop, or give both sides: resize: \[9, 9\]"),
        ({"preprocessor": "photos"}, "preprocessor '.*/photos': has none of preprocessor_config"),
        ({**GREY, "classes": {"ant": 0}}, "class folder 'bee', which classes does not name"),
        ({**GREY, "layout": "channels-last"}, "; set layout: channels-first beside images"),
    ],
)
def test_what_does_not_fit_is_found_by_the_plan(
    on_onnx: Project, photos: Path, options: dict[str, Any], message: str
):
    with pytest.raises((SpecError, DataError), match=message):
        images(on_onnx, **options).plan()
