"""Data that both calibrate and judge are noticed, and data that are prepared otherwise."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from compressor import Spec
from compressor.errors import SpecError
from compressor.front.spec import checked
from compressor.run.evaluate import Evaluation
from compressor.run.plan import make_plan
from compressor.run.verdicts.data_doubts import (
    check_data_is_of_use,
    check_output_apart,
    copied_samples,
    data_doubts,
    folders_missing,
    judged_on,
    no_evidence,
    outputs_not_judged,
    scales_apart,
)
from compressor.spec.load import load_spec
from compressor.types.carrier import Capability
from tests.compressor.tiny_project import Project, tiny_module

STATIC = [{"pass": "quantize-static"}]


@pytest.mark.parametrize(("copies", "doubted"), [(0, False), (5, False), (6, True), (450, True)])
def test_copies_of_samples_are_doubted(copies: int, doubted: bool):
    metric = {"name": "accuracy", "value": 90.0, "samples": 500}
    found = Evaluation(metric, np.ones(500), None, None, 0.0, copies=copies)
    assert bool(copied_samples(found)) == doubted
    assert copied_samples(None) == []


def test_other_outputs_that_have_changed_are_doubted():
    kept = {"a": 10.0, "b": None, "c": 60.0}
    assert outputs_not_judged("accuracy", kept) == []
    (few,) = outputs_not_judged("accuracy", {**kept, "far": 9.9, "farther": -3.0})
    assert few.startswith("accuracy does not look at all outputs")
    assert ": 'farther' by 200%, 'far' by 10%; judge" in few
    (many,) = outputs_not_judged("top5", {str(n): float(n) for n in range(5)})
    assert ": '0' by 100%, '1' by 79%, '2' by 63% and 2 more; judge" in many


@pytest.mark.parametrize(("copies", "shown"), [(0, True), (250, True), (251, False)])
def test_copies_of_samples_narrow_no_interval(on_onnx: Project, copies: int, shown: bool):
    """50 images, 40 times each: an interval of 7 points became one of 0.2."""
    spec = load_spec(on_onnx.path)
    metric = {"name": "accuracy", "value": 90.0, "samples": 500}
    why = no_evidence(spec, Evaluation(metric, np.ones(500), None, None, 0.0, copies=copies))
    assert why == ("" if shown else "50 % of the samples are copies of others")
    assert no_evidence(spec, None) == ""


@pytest.mark.parametrize(("passes", "shown"), [([{"pass": "finetune"}], False), (STATIC, True)])
def test_who_trains_on_what_judges_shows_nothing(passes: list[dict[str, Any]], shown: bool):
    """It was passed: 100 % right, 2.5 points better than the float model."""
    labelled = (torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64))
    spec = checked(
        Spec(
            name="both",
            model=tiny_module(),
            data={
                "calibration": labelled[0].clone(),
                "training": labelled,
                "evaluation": labelled,
            },
            passes=passes,
            exports=[{"format": "onnx"}],
        )
    )
    metric = {"name": "accuracy", "value": 90.0, "samples": 500}
    found = Evaluation(metric, np.ones(500), None, None, 0.0)
    assert bool(judged_on(spec, "training")) is not shown
    assert no_evidence(spec, found) == ("" if shown else "a pass trains on the samples that judge")


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
    assert bool(judged_on(load_spec(on_onnx.path), "calibration")) is doubted


def test_a_copy_of_the_file_is_the_same_data(on_onnx: Project):
    (on_onnx.folder / "copy.npz").write_bytes((on_onnx.folder / "calib.npz").read_bytes())
    data = on_onnx.spec["data"]
    data["calibration"] = {"npz": "calib.npz", "inputs": {"image": "image"}}
    data["evaluation"] = {**data["calibration"], "npz": "copy.npz"}
    on_onnx.spec["metric"] = "cosine"
    assert judged_on(load_spec(on_onnx.path), "calibration")
    data["evaluation"]["fold"], data["calibration"]["fold"] = "1/2", "2/2"
    assert not judged_on(load_spec(on_onnx.path), "calibration")
    whole = (on_onnx.folder / "copy.npz").read_bytes()
    (on_onnx.folder / "copy.npz").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    times = (on_onnx.folder / "calib.npz").stat()
    os.utime(on_onnx.folder / "copy.npz", ns=(times.st_atime_ns, times.st_mtime_ns))
    del data["evaluation"]["fold"], data["calibration"]["fold"]
    assert not judged_on(load_spec(on_onnx.path), "calibration")


@pytest.mark.parametrize(
    ("folds", "doubted"),
    [
        (("1/2", "2/2"), False),
        (("1/2", "2/4"), False),
        (("1/2", "3/4"), True),
        (("1/2", "1/3"), True),
        (("1/3", "2/3"), False),
        (("1/4", "3/4"), False),
        (("1/4", "3/6"), True),
        (("1/4", "2/6"), False),
    ],
)
def test_folds_may_share_no_sample(on_onnx: Project, folds: tuple[str, str], doubted: bool):
    one = {"npz": "calib.npz", "inputs": {"image": "image"}}
    on_onnx.spec["data"] = {
        role: {**one, "fold": fold}
        for role, fold in zip(("calibration", "evaluation"), folds, strict=True)
    }
    assert bool(judged_on(load_spec(on_onnx.path), "calibration")) is doubted


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
        assert bool(judged_on(checked(spec), "calibration")) is doubted


def test_data_that_are_prepared_otherwise():
    """Calibrated on pixels up to 255 and judged on pixels up to 1, int8 lost 50 points unsaid."""
    pixels = np.full((1, 2, 2), 255, np.float32)
    (doubt,) = scales_apart({"x": pixels, "y": pixels}, {"x": -pixels / 255, "y": pixels / 15})
    assert doubt.startswith(
        "input 'x' reaches 255 in the first sample of data.calibration and 1 in"
    )
    none = {"x": pixels * 0, "y": pixels * np.nan}
    assert not scales_apart({"x": pixels, "y": pixels}, none)
    assert not scales_apart({"x": pixels.astype(np.int64)}, {"x": np.ones((1, 2, 2), np.int64)})
    assert not scales_apart({"x": pixels}, {"other": pixels / 255})
    assert not scales_apart({"x": pixels}, {"x": pixels * np.inf})
    assert not scales_apart({"x": pixels}, {"x": np.zeros((0, 2, 2), np.float32)})


@pytest.mark.parametrize(("other", "doubted"), [(1.0, False), (0.99, True)])
def test_sixteen_times_is_far_apart(other: float, doubted: bool):
    near, far = (np.full((1, 2), value, np.float32) for value in (0.03125 * other, 0.5))
    assert bool(scales_apart({"x": near}, {"x": far})) is doubted


def test_data_of_one_role_are_judged_on_nothing_else(on_onnx: Project):
    del on_onnx.spec["data"]["evaluation"]
    on_onnx.spec |= {"limits": {"metric-drop": None}, "passes": [{"pass": "fuse"}]}
    on_onnx.spec.pop("metric", None)
    assert judged_on(load_spec(on_onnx.path), "calibration") == []


def test_the_remedy_names_folds_where_there_are_samples_to_part(on_onnx: Project):
    one = {"npz": "calib.npz", "inputs": {"image": "image"}}
    on_onnx.spec["data"] = {"calibration": one, "evaluation": one}
    on_onnx.spec["metric"] = "cosine"
    (doubt,) = judged_on(load_spec(on_onnx.path), "calibration")
    assert doubt.endswith(
        "on the samples that calibrate, which flatters it: use other samples for "
        "data.evaluation (--eval of compress quantize), or let each read every other sample "
        "(fold: 1/2 and fold: 2/2)"
    )


@pytest.mark.parametrize(("passes", "doubts"), [(STATIC, 1), ([{"pass": "fuse"}], 0)])
def test_doubts_are_warnings_of_a_plan_whose_passes_calibrate(
    on_onnx: Project, passes: list[dict[str, Any]], doubts: int
):
    data = on_onnx.spec["data"]
    data["calibration"]["npz"] = data["evaluation"]["npz"]
    on_onnx.spec["passes"] = passes
    plan = on_onnx.plan()
    assert len(plan.doubts) == doubts
    assert set(plan.doubts) <= set(plan.warnings)


@pytest.mark.parametrize(
    ("folders", "keys", "doubted"),
    [
        ("abc", {}, True),
        ("abcd", {}, False),
        ("abc", {"target": None}, False),
        ("abc", {"classes": {"a": 0, "b": 2, "c": 3}}, False),
    ],
)
def test_a_missing_class_folder_is_doubted(
    on_onnx: Project, folders: str, keys: dict[str, Any], doubted: bool
):
    """Nine folders of ten classes: 0 % right, and not a word."""
    for name in folders:
        place = on_onnx.folder / "photos" / name
        place.mkdir(parents=True)
        Image.new("L", (8, 8)).save(place / "1.png")
    one = {"images": "photos", "size": [8, 8], "inputs": {"image": "image"}, "target": "label"}
    one |= {"colour": "grey", "layout": "channels-first", "mean": [0.5], "std": [0.5]}
    on_onnx.spec |= {"data": {"evaluation": {**one, **keys}}, "passes": [{"pass": "fuse"}]}
    plan = on_onnx.plan()
    words = "data.evaluation has 3 class folders, numbered in their order, and the model gives 4"
    assert [d.startswith(words) for d in plan.doubts if "folders" in d] == [True] * doubted


@pytest.mark.parametrize(
    ("shapes", "doubted"),
    [
        ([("batch", 3)], True),
        ([("batch", 2)], False),
        ([("batch", "classes")], False),
        ([("batch", 3, 3)], False),
        ([(3,)], False),
        ([], False),
        ([("batch", 2), ("batch", 3)], False),
    ],
)
def test_folders_are_held_against_the_scores_of_classes(
    on_onnx: Project, shapes: list[tuple[Any, ...]], doubted: bool
):
    """Of the first output: one number for each class, and each class a folder."""
    for name in "ab":
        (on_onnx.folder / "photos" / name).mkdir(parents=True)
    one = {"images": "photos", "size": [8, 8], "inputs": {"image": "image"}, "target": "label"}
    on_onnx.spec |= {"data": {"evaluation": one}, "passes": [{"pass": "fuse"}]}
    carrier: Any = SimpleNamespace(outputs=[SimpleNamespace(shape=shape) for shape in shapes])
    assert bool(folders_missing(load_spec(on_onnx.path), carrier)) is doubted


def test_one_folder_of_two_classes_is_doubted_and_one_score_is_no_class(on_onnx: Project):
    (on_onnx.folder / "photos" / "a").mkdir(parents=True)
    one = {"images": "photos", "size": [8, 8], "inputs": {"image": "image"}, "target": "label"}
    on_onnx.spec |= {"data": {"evaluation": one}, "passes": [{"pass": "fuse"}]}
    spec = load_spec(on_onnx.path)
    for scores, doubted in ((2, True), (1, False)):
        carrier: Any = SimpleNamespace(outputs=[SimpleNamespace(shape=("batch", scores))])
        assert bool(folders_missing(spec, carrier)) is doubted
    spec = load_spec(on_onnx.path)
    calibration: Any = SimpleNamespace(data={"calibration": spec.data["evaluation"]})
    assert folders_missing(calibration, carrier) == []


def test_only_what_calibrates_is_held_against_what_judges(on_onnx: Project):
    one = {"npz": "calib.npz", "inputs": {"image": "image"}}
    on_onnx.spec |= {"data": {"calibration": one, "evaluation": one}, "metric": "cosine"}
    spec, carrier = load_spec(on_onnx.path), SimpleNamespace(outputs=[], inputs=[])
    ones = {"image": np.ones((1, 2), np.float32)}
    samples = {"calibration": ones, "evaluation": {"image": 255 * ones["image"]}}

    def doubts(samples: Any, calibrates: bool) -> list[str]:
        found = data_doubts(spec, carrier, samples, calibrates=calibrates)  # type: ignore[arg-type]
        return [words.split(" ", 2)[1] for words in found]

    assert doubts(samples, calibrates=True) == ["is", "'image'"]  # quality is judged on, and input
    assert doubts(samples, calibrates=False) == []
    assert doubts({"evaluation": ones}, calibrates=True) == []


@pytest.mark.parametrize(
    ("offers", "refused"),
    [
        ({Capability.RUN}, False),
        ({Capability.BLOCKS, Capability.WEIGHTS}, False),
        ({Capability.WEIGHTS}, True),
    ],
)
def test_data_need_a_model_that_runs_whole_or_by_blocks(
    on_onnx: Project, offers: set[Capability], refused: bool
):
    spec, carrier = load_spec(on_onnx.path), SimpleNamespace(offers=offers)
    if not refused:
        check_data_is_of_use(spec, carrier)  # type: ignore[arg-type]
        return
    role = next(iter(spec.data))
    problem = rf"data\.{role}: cannot be used: a bare checkpoint has no graph.*leave data out, or"
    with pytest.raises(SpecError, match=problem) as error:
        check_data_is_of_use(spec, carrier)  # type: ignore[arg-type]
    assert error.value.where == spec.data[role].where
    none: Any = SimpleNamespace(data={})
    check_data_is_of_use(none, carrier)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "refused"), [("photos/out", True), ("photos", True), ("out", False)]
)
@pytest.mark.parametrize("before", [{}, {"calibration": {"npz": "calib.npz"}}], ids=len)
def test_results_do_not_become_a_class(
    on_onnx: Project, before: dict[str, Any], output: str, refused: bool
):
    """An output folder among class folders was one of them: later runs had other labels."""
    for name in ("rose", "tulip"):
        (on_onnx.folder / "photos" / name).mkdir(parents=True)
    one = {"images": "photos", "size": [8, 8], "inputs": {"image": "image"}}
    before = {role: {**keys, "inputs": {"image": "image"}} for role, keys in before.items()}
    on_onnx.spec |= {"data": {**before, "evaluation": one}, "output": output}
    spec = load_spec(on_onnx.path)
    if not refused:
        check_output_apart(spec)
        return
    with pytest.raises(
        SpecError, match=r"output: '.*' lies in the folder that data.evaluation rea"
    ):
        make_plan(spec)
