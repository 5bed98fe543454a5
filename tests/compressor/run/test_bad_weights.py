"""Unusable checkpoints and ONNX files through the command line: a message, and nothing is left."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

from tests.compressor.run.spoiled import NOT_FINITE, Spoil, check, cut, refused
from tests.compressor.tiny_project import (
    CHECKPOINT,
    ONNX,
    Project,
    setting,
    tiny_module,
    tiny_onnx,
)


def checkpoint(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Write a checkpoint of what ``change`` makes of the right one."""

    def write(project: Project) -> None:
        tensors = dict(tiny_module().state_dict())
        torch.save(change(tensors), project.folder / CHECKPOINT)

    return write


def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    tensors["convolution2.weight"] = tensors.pop("conv2.weight")
    return {**tensors, "head.scale": torch.ones(1)}


DAMAGED = ("cannot be read (", "the file is truncated or damaged")


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        pytest.param(
            setting("model.config", {"width": 6}),
            (
                "has 'conv1.weight' with shape [8, 1, 3, 3]",
                "the factory's module expects [6, 1, 3, 3]",
                "build the network with the sizes it was trained with",
            ),
            id="shapes",
        ),
        pytest.param(
            checkpoint(renamed),
            (
                "lacks 'conv2.weight' and has unexpected 'convolution2.weight', 'head.scale'",
                "'conv2.weight' may be its 'convolution2.weight'",
            ),
            id="names",
        ),
        pytest.param(
            checkpoint(lambda _: {"epoch": 3, "optimizer": {}}),
            ("has no state_dict (found epoch, optimizer)", "save model.state_dict()"),
            id="no tensors",
        ),
        pytest.param(
            checkpoint(lambda _: torch.nn.Linear(2, 2)),
            ("holds torch.nn.modules.linear.Linear", "save the state_dict alone"),
            id="whole module",
        ),
        pytest.param(cut(CHECKPOINT, 0), DAMAGED, id="empty"),
        pytest.param(cut(CHECKPOINT, 0.001), DAMAGED, id="cut at once"),
        pytest.param(cut(CHECKPOINT, 0.5), DAMAGED, id="cut in the middle"),
        pytest.param(cut(CHECKPOINT, 0.999), DAMAGED, id="cut at the end"),
        pytest.param(
            lambda project: (project.folder / CHECKPOINT).write_text("<!DOCTYPE html>"),
            ("is not a PyTorch file (Unsupported operand 60)", "or save it again"),
            id="a web page",
        ),
        pytest.param(
            lambda project: (project.folder / CHECKPOINT).write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
            ),
            ("is a Git LFS pointer, not the file itself", "git lfs pull"),
            id="a pointer",
        ),
    ],
)
def test_checkpoints(on_torch: Project, spoil: Spoil, parts: tuple[str, ...]):
    where = f"FOLDER/spec.yaml:6: checkpoint 'FOLDER/{CHECKPOINT}'"
    check(on_torch, spoil, 3, where, *parts)


def test_a_checkpoint_that_is_not_there(on_torch: Project):
    missing = setting("model.checkpoint", "gone.pt")
    check(on_torch, missing, 2, "spec.yaml:6: ", "'FOLDER/gone.pt'", "does not exist", "check")


def test_a_checkpoint_of_an_unknown_kind(on_torch: Project):
    (on_torch.folder / "tiny.npz").touch()
    other = setting("model.checkpoint", "tiny.npz")
    check(on_torch, other, 2, "has the unknown suffix '.npz'", "give a .safetensors, .pt, .pth")


@pytest.mark.parametrize("share", [0, 0.003, 0.4, 0.95])
def test_a_truncated_safetensors_file(on_torch: Project, share: float):
    save_file(tiny_module().state_dict(), on_torch.folder / "tiny.safetensors")
    on_torch.spec["model"]["checkpoint"] = "tiny.safetensors"
    check(on_torch, cut("tiny.safetensors", share), 3, "'FOLDER/tiny.safetensors'", *DAMAGED)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path):
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.made}",)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle 2", "pickle 5", "inside a state_dict"])
def test_a_pickle_that_would_run_code(on_torch: Project, tmp_path: Path, form: str):
    made = tmp_path / "made"
    path = on_torch.folder / CHECKPOINT
    evil = {"conv1.weight": Evil(made)}
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps(evil, protocol=int(form[-1])))
    elif form == "inside a state_dict":
        torch.save({"state_dict": tiny_module().state_dict(), "extra": Evil(made)}, path)
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=form == "zip")
    check(
        on_torch,
        lambda _: None,
        3,
        "which would run code when opened",
        "save the state_dict alone: torch.save(model.state_dict(), path)",
    )
    assert not made.exists()


def spoiled_onnx(change: Callable[[onnx.ModelProto], None]) -> Spoil:
    def write(project: Project) -> None:
        model = tiny_onnx()
        change(model)
        onnx.save(model, project.folder / ONNX)

    return write


def with_value(name: str, value: float) -> Spoil:
    def change(model: onnx.ModelProto) -> None:
        (tensor,) = [t for t in model.graph.initializer if t.name == name]
        array = numpy_helper.to_array(tensor).copy()
        array.flat[:2] = value
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return spoiled_onnx(change)


NOT_ONNX = ("is not an ONNX file", "the file is truncated or of another format")


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        pytest.param(cut(ONNX, 0.005), NOT_ONNX, id="cut at once"),
        pytest.param(cut(ONNX, 0.5), NOT_ONNX, id="cut in the middle"),
        pytest.param(cut(ONNX, 0.99), NOT_ONNX, id="cut at the end"),
        pytest.param(cut(ONNX, 0), ("is empty", "of another format"), id="empty"),
        pytest.param(
            lambda project: (project.folder / ONNX).write_text("hello\n" * 100),
            NOT_ONNX,
            id="text",
        ),
        pytest.param(
            lambda project: torch.save({}, project.folder / ONNX), NOT_ONNX, id="a checkpoint"
        ),
        pytest.param(
            with_value("conv2.weight", np.nan), ("tensor 'conv2.weight'", *NOT_FINITE), id="nan"
        ),
        pytest.param(
            with_value("fc.bias", np.inf), ("tensor 'fc.bias'", *NOT_FINITE), id="infinity"
        ),
        pytest.param(
            spoiled_onnx(lambda model: model.graph.ClearField("node")),
            ("holds no graph",),
            id="no nodes",
        ),
    ],
)
def test_onnx_files(on_onnx: Project, spoil: Spoil, parts: tuple[str, ...]):
    check(on_onnx, spoil, 3, f"FOLDER/spec.yaml:5: model 'FOLDER/{ONNX}'", *parts)


def test_nan_in_a_checkpoint(on_torch: Project):
    """It is found when the weights are read: the run has begun, and leaves nothing all the same."""

    def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["fc.weight"][1, 2:4] = torch.nan
        return tensors

    checkpoint(spoil)(on_torch)
    on_torch.spec["passes"] = [{"pass": "fuse"}]
    message = refused(on_torch, 3)
    for part in ("FOLDER/spec.yaml:6: ", "tensor 'fc.weight'", *NOT_FINITE):
        assert part in message
    assert not on_torch.output.exists()
