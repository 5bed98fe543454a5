"""Code of the user's that ends the program: an error in one line, never an exit of its choice."""

from __future__ import annotations

import argparse

import pytest

import compressor
from compressor import CompressorError, RunOptions
from compressor.spec.user_code import exit_error
from tests.compressor.run.spoiled import Spoil, check
from tests.compressor.tiny_project import NETWORK, Project, setting

EXITS = """
import argparse
import sys


def metric(outputs, target):
    sys.exit(0)


def transform(batch):
    sys.exit()


def data():
    argparse.ArgumentParser(add_help=False).exit(1)
    yield {}
"""
_DATA = {"inputs": {"image": "image"}, "target": "label"}


def written(project: Project, name: str) -> str:
    """Write the functions as a module of its own for each test, which Python imports once."""
    (project.folder / f"{name}.py").write_text(EXITS)
    return name


@pytest.mark.parametrize(
    ("key", "function", "parts"),
    [
        ("metric", "metric", ("metric 'FILE:metric': failed (SystemExit: 0); check that it fits",)),
        ("data.evaluation.transform", "transform", ("transform 'FILE:transform': raised System",)),
        ("data.evaluation", "data", ("data factory 'FILE:data': raised SystemExit: 1; correct",)),
    ],
)
def test_functions_of_a_spec(on_onnx: Project, key: str, function: str, parts: tuple[str, ...]):
    name = written(on_onnx, f"exits_{function}")
    value: object = f"{name}:{function}"
    value = {"factory": value, **_DATA} if function == "data" else value
    check(on_onnx, setting(key, value), 3, *(part.replace("FILE", name) for part in parts))


def forward_exits() -> Spoil:
    def write(project: Project) -> None:
        start = "def forward(self, image):\n"
        network = NETWORK.replace(start, f"{start}        quit(0)\n")
        (project.folder / "tiny_net.py").write_text(network)

    return write


def test_a_module_that_ends_the_program(on_torch: Project):
    check(on_torch, forward_exits(), 3, "'tiny_net.py', line 15: ", "(SystemExit: 0)")


def test_a_call_from_python(on_onnx: Project):
    on_onnx.spec["metric"] = f"{written(on_onnx, 'exits_from_python')}:metric"
    with pytest.raises(CompressorError, match=r"failed \(SystemExit: 0\)"):
        compressor.run(on_onnx.path)


def test_a_callback_ends_the_call_and_not_the_program(on_torch: Project):
    on_torch.spec["data"]["training"] = {**on_torch.spec["data"]["evaluation"]}
    on_torch.spec["passes"] = [{"pass": "finetune", "steps": 1}]

    def stop(step: object) -> None:
        raise SystemExit(2)

    with pytest.raises(CompressorError, match=r"file 'test_user_exits.py', line \d+: tried to end"):
        compressor.run(on_torch.path, RunOptions(callbacks=[stop]))


def test_an_interruption_stays_one(on_onnx: Project):
    name = "interrupts_from_python"
    (on_onnx.folder / f"{name}.py").write_text("def metric(a, b):\n    raise KeyboardInterrupt\n")
    on_onnx.spec["metric"] = f"{name}:metric"
    with pytest.raises(KeyboardInterrupt):
        compressor.run(on_onnx.path)


def test_the_place_is_the_users_where_a_library_exits():
    with pytest.raises(SystemExit) as left:
        argparse.ArgumentParser(prog="train", add_help=False).exit()
    assert exit_error(left.value).subject.startswith("file 'test_user_exits.py', line ")
