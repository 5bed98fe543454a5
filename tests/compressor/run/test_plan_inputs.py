"""Planning: a model's inputs and the data for them must fit."""

from typing import Any

import numpy as np
import onnx
import pytest

from compressor.errors import CompressorError, DataError
from tests.compressor.run.plan_refusals import line_of, refusal
from tests.compressor.tiny_project import (
    ONNX,
    SIDE,
    Project,
    sample_images,
    tiny_onnx,
    write_data,
)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"image": {"shape": ["n", 3, SIDE, SIDE]}},
            "model.inputs.image: says image float32[n, 3, 8, 8], "
            "the ONNX file has image float32[batch, 1, 8, 8]; ",
        ),
        (
            {"image": {"shape": ["n", 1, SIDE]}},
            "model.inputs.image: says image float32[n, 1, 8], ",
        ),
        (
            {"image": {"shape": ["n", 1, SIDE, SIDE], "dtype": "uint8"}},
            "model.inputs.image: says image uint8[n, 1, 8, 8], ",
        ),
        (
            {"picture": {"shape": ["n", 1, SIDE, SIDE]}},
            "model.inputs.picture: is not an input of the ONNX file; it has image",
        ),
    ],
)
def test_inputs_that_an_onnx_file_does_not_have(
    on_onnx: Project, inputs: dict[str, Any], message: str
):
    on_onnx.spec["model"]["inputs"] = inputs
    name = next(iter(inputs))
    assert refusal(on_onnx).startswith(f"{line_of(on_onnx, f'{name}')}: {message}")


def test_inputs_that_an_onnx_file_has(on_onnx: Project):
    on_onnx.spec["model"]["inputs"] = {"image": {"shape": [4, 1, "h", "w"]}}
    (own,) = on_onnx.plan().model.carrier.inputs
    assert str(own) == "image float32[batch, 1, 8, 8]"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "model.inputs: is empty, a module does not know its own inputs; write e.g. "),
        (
            {"image": {"shape": ["n", 1, 8, 8]}, "mask": {"shape": ["n"]}},
            "model.inputs: names 2 inputs, but forward of TinyNet takes 1; its parameters are "
            "image",
        ),
        (
            {"image": {"shape": ["n", 3, 8, 8]}},
            "module TinyNet: cannot be lowered to a graph (RuntimeError: Given groups=1, ",
        ),
    ],
)
def test_inputs_that_a_module_does_not_take(
    on_torch: Project, inputs: dict[str, Any], message: str
):
    on_torch.spec["model"]["inputs"] = inputs
    assert message in refusal(on_torch, CompressorError)


def save(project: Project, **arrays: np.ndarray) -> None:
    np.savez(project.folder / "test.npz", **arrays)


LABELS = np.zeros(48, np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"image": sample_images(1)[:, :, :4], "label": LABELS},
            "evaluation data, input 'image': shape is [1, 1, 4, 8], the model expects "
            "image float32[batch, 1, 8, 8]; convert it in a transform",
        ),
        (
            {"image": sample_images(1)[:, 0], "label": LABELS},
            "evaluation data, input 'image': shape is [1, 8, 8], ",
        ),
        (
            {"image": sample_images(1).astype(np.float64), "label": LABELS},
            "evaluation data, input 'image': dtype is float64, the model expects float32; ",
        ),
        (
            {"image": sample_images(1)[:0], "label": LABELS[:0]},
            "data 'FOLDER/test.npz': array 'image' is empty, ",
        ),
        (
            {"picture": sample_images(1), "label": LABELS},
            "data 'FOLDER/test.npz': has no array 'image'; ",
        ),
        (
            {"image": sample_images(1), "lable": LABELS},
            "data 'FOLDER/test.npz': has no array 'label'; did you mean 'lable'? ",
        ),
        (
            {"image": sample_images(1), "label": LABELS[:40]},
            "data 'FOLDER/test.npz': its arrays have different lengths: ",
        ),
    ],
)
def test_data_that_do_not_fit(on_onnx: Project, arrays: dict[str, np.ndarray], message: str):
    save(on_onnx, **arrays)
    found = refusal(on_onnx, DataError)
    assert found.startswith(f"{line_of(on_onnx, 'test.npz')}: {message}")


def test_an_input_without_data(on_onnx: Project):
    on_onnx.spec["data"]["calibration"]["inputs"] = {"img": "image"}
    assert refusal(on_onnx, DataError) == (
        f"{line_of(on_onnx, 'calib.npz')}: calibration data: has no array for the model's input "
        "'image'; map it under inputs: did you mean 'img'?"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(batch): return batch['x']", "inputs: has the arrays 'image', 'label', and "),
        ("def f(batch): return None", "transform 'tiny_data:f': returned a NoneType; "),
        (
            "def f(batch): return {'image': batch['image']}",
            "evaluation data: has no target 'label' after its transform; let the transform pass",
        ),
        (
            "def f(batch): return {**batch, 'image': batch['image'][:, :, 1:]}",
            "evaluation data, input 'image': shape is [1, 1, 7, 8], ",
        ),
        ("def g(batch): pass", "data.evaluation.transform: 'tiny_data' has no 'f'; there is: g"),
        ("f = 3", "data.evaluation.transform: 'tiny_data:f' is a int; name a function"),
    ],
)
def test_transforms_that_go_wrong(on_onnx: Project, source: str, message: str):
    (on_onnx.folder / "tiny_data.py").write_text(source)
    on_onnx.spec["data"]["evaluation"]["transform"] = "tiny_data:f"
    found = refusal(on_onnx, CompressorError)
    assert found.startswith(f"{line_of(on_onnx, 'test.npz')}: {message}")


def fixed_batch(project: Project, batch: int) -> None:
    onnx.save(tiny_onnx(batch=4), project.folder / ONNX)
    for entry in project.spec["data"].values():
        entry["batch"] = batch


def test_a_fixed_batch_is_the_default(on_onnx: Project):
    fixed_batch(on_onnx, 16)
    for entry in on_onnx.spec["data"].values():
        del entry["batch"]
    plan = on_onnx.plan()
    assert {data.batch for data in plan.data.values()} == {4}


def test_a_model_with_a_fixed_batch(on_onnx: Project):
    fixed_batch(on_onnx, 16)
    assert refusal(on_onnx) == (
        f"{line_of(on_onnx, 'calib.npz')}: data.calibration.batch: is 16, and the model takes "
        "4 samples at a time; set batch: 4"
    )
    fixed_batch(on_onnx, 4)
    on_onnx.spec["data"]["evaluation"]["samples"] = 46
    assert refusal(on_onnx) == (
        f"{line_of(on_onnx, 'test.npz')}: evaluation data: has 46 samples, and the model takes "
        "4 at a time; set samples: 44"
    )
    on_onnx.spec["data"]["evaluation"]["samples"] = 44
    result = on_onnx.run()
    assert result.report["baseline"]["metric"]["samples"] == 44
    assert [row["batch"] for row in result.report["artifacts"][0]["latency"]] == [4]


def test_samples_of_a_function_fill_a_fixed_batch(on_onnx: Project):
    fixed_batch(on_onnx, 4)
    (on_onnx.folder / "made.py").write_text(
        "import numpy as np\n\n\ndef batches():\n"
        "    for _ in range(3):\n        yield {'image': np.zeros((10, 1, 8, 8), np.float32)}\n"
    )
    on_onnx.spec["data"]["calibration"] = {"factory": "made:batches", "batch": 4}
    assert "has 30 samples, and the model takes 4 at a time; set samples: 28" in refusal(on_onnx)


def test_labels_that_are_no_class_numbers_are_found_at_plan_time(on_onnx: Project):
    with np.load(on_onnx.folder / "test.npz") as file:
        images, labels = file["image"], file["label"]
    np.savez(on_onnx.folder / "test.npz", image=images, label=labels.astype(np.float32))
    with pytest.raises(DataError, match=r"float32, not numbers of classes.*int64") as caught:
        on_onnx.plan()
    assert caught.value.where is not None


@pytest.mark.parametrize("axes", [[5, "batch", 3], ["time", "batch_size", 3]])
def test_samples_on_a_later_axis_are_not_stacked_on_the_first(on_onnx: Project, axes: list[Any]):
    """Time steps were taken for samples: a recurrent network had 17 % accuracy in place of 94."""
    onnx.save(time_first(axes), on_onnx.folder / ONNX)
    write_data(on_onnx.folder, np.zeros((10, 5, 3), np.float32), np.zeros(10, np.int64))
    assert "does not begin with an axis for samples; add samples: feeds" in refusal(on_onnx)


def time_first(axes: list[Any]) -> onnx.ModelProto:
    """A network that reads ``[time, batch, features]`` and gives scores ``[batch, 4]``."""
    weight = onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "weight")
    nodes = [
        onnx.helper.make_node("ReduceMean", ["image"], ["mean"], axes=[0], keepdims=0),
        onnx.helper.make_node("MatMul", ["mean", "weight"], ["logits"]),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "time first",
        [onnx.helper.make_tensor_value_info("image", kind, axes)],
        [onnx.helper.make_tensor_value_info("logits", kind, [axes[1], 4])],
        [weight],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
