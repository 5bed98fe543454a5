"""A starter spec scales pixels as the first batch norm of a model has seen them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from compressor.lab.starter import write_starter
from compressor.lab.starter_data import Choices
from compressor.lab.starter_levels import _USUAL

PIXELS = np.random.default_rng(0).integers(0, 180, (8, 6, 6, 3), dtype=np.uint8)


def save(path: Path, mean: float | list[float], std: float | list[float], *, norm: bool) -> Path:
    """Write a point-wise convolution and the norm of what it gives for the pixels."""
    weight = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    seen = ((PIXELS / 255 - mean) / std) @ weight.T
    arrays = {
        "w": weight[:, :, None, None],
        "gamma": np.ones(4),
        "beta": np.zeros(4),
        "mean": seen.mean((0, 1, 2)),
        "var": seen.var((0, 1, 2)),
    }
    statistics = list(arrays)[1:]
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["a"]),
        helper.make_node("BatchNormalization", ["a", *statistics], ["y"])
        if norm
        else helper.make_node("Relu", ["a"], ["y"]),
    ]
    first = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, 6, 6])
    last = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4, 6, 6])
    kept = arrays if norm else {"w": arrays["w"]}
    stored = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in kept.items()]
    graph = helper.make_graph(nodes, "g", [first], [last], stored)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.mark.parametrize("usual", range(len(_USUAL)))
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("files", [True, False])
def test_the_usual_scale_that_fits_is_taken(
    tmp_path: Path, usual: int, norm: bool, files: bool
) -> None:
    mean, std = _USUAL[usual]
    numbers = [np.array(text.strip("[]").split(", "), float).tolist() for text in (mean, std)]
    model = save(tmp_path / "net.onnx", *numbers, norm=norm)
    data = tmp_path / ("images" if files else "pixels.npz")
    if files:
        data.mkdir()
        for number, pixels in enumerate(PIXELS):
            Image.fromarray(pixels).save(data / f"{number}.png")
    else:
        np.savez(data, image=PIXELS)
    write_starter(model, tmp_path / "spec.yaml", Choices(data))
    text = (tmp_path / ("spec.yaml" if files else "spec_data.py")).read_text()
    if not norm:
        (mean, std), why = _USUAL[0], "CHECK: as in training"
    else:
        why = "CHECK: the usual scale nearest to what the first batch norm saw"
    assert why in text
    if files:
        assert f"    mean: {mean} # " in text
        assert f"    std: {std}\n" in text
    else:
        assert f"MEAN, STD = np.float32({mean}), np.float32({std})" in text
