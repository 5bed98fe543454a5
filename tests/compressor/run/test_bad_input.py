"""Unusable specs, modules and data through the command line: a message, nothing left."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from compressor.cli.application import application
from tests.compressor.run.spoiled import Spoil, check, cut, refused
from tests.compressor.tiny_project import (
    MODULE,
    Project,
    sample_images,
    setting,
)


@pytest.mark.parametrize(
    ("spoil", "code", "parts"),
    [
        (
            setting("modle", {}),
            2,
            ("spec.yaml:", "modle: is not a known key", "did you mean 'model'?"),
        ),
        (setting("seed", "one"), 2, ("spec.yaml:", 'seed: is "one"', "it must be a valid integer")),
        (
            setting("model.onnx", "gone.onnx"),
            2,
            ("spec.yaml:5: ", "model 'FOLDER/gone.onnx'", "does not exist", "check model.onnx"),
        ),
        (
            setting("data.evaluation.npz", "gone.npz"),
            2,
            ("data.evaluation.npz: 'FOLDER/gone.npz' does not exist", "correct the path"),
        ),
        (
            setting("passes", [{"pass": "cast", "layers": [{"match": "head", "skip": True}]}]),
            2,
            ("spec.yaml:", "layer rule 'head'", "matches no layer", "there is: conv1, conv2, fc"),
        ),
        (
            setting("metric", "acuracy"),
            2,
            ("metric 'acuracy'", "is not known", "did you mean 'accuracy'?"),
        ),
    ],
    ids=["unknown key", "wrong type", "no model", "no data", "rule", "metric"],
)
def test_specs(on_onnx: Project, spoil: Spoil, code: int, parts: tuple[str, ...]):
    check(on_onnx, spoil, code, *parts)


@pytest.mark.parametrize("role", ["evaluation", "calibration"])
@pytest.mark.parametrize(
    ("function", "returned"), [("a[: len(a) // 2]", 0), ("a.repeat(2, axis=0)", 2)]
)
def test_a_transform_that_returns_another_number_of_samples(
    on_onnx: Project, role: str, function: str, returned: int
):
    name = f"returns_{returned}_{role}"  # a module of its own for each test
    code = f"def count(batch):\n    return {{n: {function} for n, a in batch.items()}}\n"
    (on_onnx.folder / f"{name}.py").write_text(code)
    spoil = setting(f"data.{role}.transform", f"{name}:count")
    said = f"returned {returned} samples for 1; return one sample for each input sample"
    check(on_onnx, spoil, 3, f"transform '{name}:count': {said}")


def test_a_spec_that_is_not_there(tmp_path: Path):
    result = CliRunner().invoke(application, ["run", str(tmp_path / "gone.yaml")])
    assert result.exit_code == 2
    assert "gone.yaml': does not exist; give the path of a YAML file" in result.stderr


def module(source: str) -> Spoil:
    def write(project: Project) -> None:
        (project.folder / f"{MODULE}.py").write_text(source)

    return write


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (
            setting("model.factory", "no_such_net:build"),
            ("model.factory: 'no_such_net' does not import", "run from the folder that holds it"),
        ),
        (setting("model.factory", f"{MODULE}:biuld"), ("has no 'biuld'", "did you mean 'build'?")),
        (
            setting("model.factory", MODULE),
            (f"{MODULE!r} is not package.module:name", "write it like"),
        ),
        (
            setting("model.config", {"widht": 4}),
            ("the factory raised TypeError: ", "'widht'", "call it in a Python shell"),
        ),
        (module("import no_such_library"), ("does not import (ModuleNotFoundError: ",)),
        (module("def build(:"), ("does not import (SyntaxError: ",)),
        (module("import sys; sys.exit(0)"), ("does not import (SystemExit: 0)",)),
        (
            module("def build(): raise ValueError('first\\nsecond')"),
            ("model.factory: the factory raised ValueError: first second; ",),
        ),
        (
            module("def build(): return {}"),
            ("the factory returned a dict", "return a torch.nn.Module"),
        ),
    ],
)
def test_factories(on_torch: Project, spoil: Spoil, parts: tuple[str, ...]):
    check(on_torch, spoil, 2, "FOLDER/spec.yaml:5: ", *parts)


def data(**arrays: np.ndarray) -> Spoil:
    def write(project: Project) -> None:
        np.savez(project.folder / "test.npz", **arrays)

    return write


LABELS = np.zeros(48, np.int64)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        pytest.param(
            data(image=sample_images(1)[:0], label=LABELS[:0]),
            ("array 'image' is empty, with shape [0, 1, 8, 8]", "save at least one sample"),
            id="empty",
        ),
        pytest.param(
            data(image=sample_images(1)[..., :5], label=LABELS),
            (
                "input 'image': shape is [1, 1, 8, 5], the model expects",
                "convert it in a transform",
            ),
            id="shape",
        ),
        pytest.param(
            data(image=(sample_images(1) * 9).astype(np.uint8), label=LABELS),
            ("input 'image': dtype is uint8, the model expects float32", "in a transform"),
            id="dtype",
        ),
        pytest.param(
            data(image=sample_images(1), label=LABELS + 4),
            ("metric 'accuracy': labels 4 to 4 for 4 classes, which are 0 to 3; check that",),
            id="labels",
        ),
        pytest.param(cut("test.npz", 0.6), ("cannot be read", "a complete npz archive"), id="cut"),
        pytest.param(
            lambda project: (project.folder / "test.npz").write_text("a,b\n1,2\n"),
            ("cannot be read", "a complete npz archive"),
            id="text",
        ),
    ],
)
def test_data(on_onnx: Project, spoil: Spoil, parts: tuple[str, ...]):
    check(on_onnx, spoil, 3, "FOLDER/spec.yaml:16: ", *parts)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        pytest.param(
            data(image=np.where(sample_images(1) > 3, np.nan, sample_images(1)), label=LABELS),
            ("input 'image': is NaN or infinite for sample ", "look at that sample in the file"),
            id="nan",
        ),
    ],
)
def test_data_that_only_a_run_can_judge(on_onnx: Project, spoil: Spoil, parts: tuple[str, ...]):
    spoil(on_onnx)
    on_onnx.spec["passes"] = [{"pass": "cast"}]
    message = refused(on_onnx, 3)
    for part in parts:
        assert part in message


def test_calibration_data_with_infinity(on_onnx: Project):
    images = sample_images(2)
    images[37, 0, 3, 3] = np.inf
    np.savez(on_onnx.folder / "calib.npz", image=images)
    on_onnx.spec["passes"] = [{"pass": "quantize-static", "layers": [{"match": "*"}]}]
    message = refused(on_onnx, 3)
    assert "tensor 'image': 1 of 1024 values are not finite, the first in sample 37; " in message
    assert message.startswith("error: FOLDER/spec.yaml:")
