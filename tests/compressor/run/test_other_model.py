"""Models beside the run's own: where their files are found, and what they take and give."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch

from compressor.run.model import OpenedModel, open_other_model, option_path
from compressor.spec.load import load_spec
from compressor.types.tensors import TensorSpec
from tests.compressor.tiny_project import NETWORK, SIDE, Project, sample_images, tiny_onnx

IMAGE = TensorSpec("image", ("batch", 1, SIDE, SIDE), "float32")


def opened(project: Project, keys: dict[str, Any], inputs: tuple[TensorSpec, ...]) -> OpenedModel:
    found = open_other_model(load_spec(project.path), keys, ("passes", 0, "teacher"), inputs)
    found.load()
    return found


def output(model: OpenedModel, images: np.ndarray) -> np.ndarray:
    return next(iter(model.carrier.runner().run({"image": images}).values()))


def test_options_are_places():
    assert option_path(2, "teacher") == ("passes", 2, "teacher")
    assert option_path(0, "teachers.1") == ("passes", 0, "teachers", 1)


def test_a_factory_takes_the_run_s_inputs_and_its_own_weights(on_onnx: Project):
    (on_onnx.folder / "tiny_net.py").write_text(NETWORK)
    scope: dict[str, Any] = {}
    exec(NETWORK, scope)
    torch.manual_seed(11)
    module = scope["build"](6).eval()
    torch.save(module.state_dict(), on_onnx.folder / "six.pt")
    keys = {"factory": "tiny_net:build", "config": {"width": 6}, "checkpoint": "six.pt"}
    model = opened(on_onnx, keys, (IMAGE,))
    images = sample_images(3)
    with torch.inference_mode():
        wanted = module(torch.from_numpy(images)).numpy()
    assert model.carrier.inputs == (IMAGE,)
    assert np.allclose(output(model, images), wanted, atol=1e-5)


def test_an_onnx_file_knows_its_inputs(on_onnx: Project):
    onnx.save(tiny_onnx(seed=4), on_onnx.folder / "teacher.onnx")
    unknown = (TensorSpec("image", (None, 1, None, None), "float32"),)
    model = opened(on_onnx, {"onnx": "teacher.onnx"}, unknown)
    session = onnx.reference.ReferenceEvaluator(tiny_onnx(seed=4))
    images = sample_images(3, 4)
    (wanted,) = session.run(None, {"image": images})
    assert np.allclose(output(model, images), wanted, atol=1e-4)
    assert model.digest() != opened(on_onnx, {"onnx": "tiny.onnx"}, unknown).digest()


def test_axes_without_a_name_get_one(on_onnx: Project):
    (on_onnx.folder / "tiny_net.py").write_text(NETWORK)
    inputs = (TensorSpec("image", (None, 1, SIDE, SIDE), "float32"),)
    model = opened(on_onnx, {"factory": "tiny_net:build"}, inputs)
    assert model.carrier.inputs == (TensorSpec("image", ("image_0", 1, SIDE, SIDE), "float32"),)
