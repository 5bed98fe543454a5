"""What ``distill`` refuses, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import CompressorError, SpecError
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.passes.train.distill.distill import Distill
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from tests.compressor.passes.train.distill_models import (
    CONTEXT,
    as_onnx,
    block,
    distilled,
    executing,
    student,
)


def pair(ours: str, theirs: str) -> dict[str, str]:
    return {"student": ours, "teacher": theirs}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "less than or equal to 1"),
        ({"alpha": -0.1}, "greater than or equal to 0"),
        ({"alpha": 1.0}, "nothing is learnt from the teacher; lower alpha, or leave"),
        ({"temperature": 0.0}, "greater than 0"),
        ({"teacher": {"onnx": "a", "factory": "b"}}, "either onnx, or factory"),
        ({"teacher": {}}, "set onnx, or factory and checkpoint"),
        ({"assistants": ({"onnx": "a.onnx"},)}, "set factory, or epochs: 0"),
        ({"features": ({"student": "conv"},)}, "teacher"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distill.model_validate(options)


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        ({"features": (pair("conf", "conv"),)}, CONTEXT, "features.0.student: names 'conf'"),
        ({"features": (pair("conf", "conv"),)}, CONTEXT, "did you mean 'conv'"),
        (
            {"attention": (pair("bn.x", "conv"),)},
            CONTEXT,
            "attention.0.student.*which is not a layer",
        ),
        ({"outputs": ("logit",)}, CONTEXT, "outputs: names 'logit'"),
        ({"alpha": 0.5}, PassContext(), "loss: is not given, and there is no metric"),
        ({"loss": "hinge"}, CONTEXT, "set cross-entropy, mse or package.module:function"),
    ],
)
def test_a_plan_finds(options: dict[str, Any], context: PassContext, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Distill.model_validate(options).survey(student(), context)


@pytest.mark.parametrize(
    ("options", "teacher", "message"),
    [
        ({}, lambda: block(8, 5), r"teacher: returns \w+ float32\[\w+, 5\], but the student .*3\]"),
        (
            {"features": (pair("conv", "body.9"),)},
            as_onnx,
            "features.0.teacher: names 'body.9', which is not a layer; did you mean 'body.0'",
        ),
        (
            {"attention": (pair("conv", "fcc"),)},
            block,
            "attention.0.teacher: names 'fcc', which is not a layer; did you mean 'fc'",
        ),
    ],
)
def test_a_plan_compares_teachers(
    options: dict[str, Any], teacher: Callable[[], Carrier], message: str
) -> None:
    chosen = Distill.model_validate({**options, "teacher": {"factory": "my:teacher"}})
    assert chosen.other_models == {"teacher": {"factory": "my:teacher"}}
    with pytest.raises(SpecError, match=message):
        chosen.check_models(student(), {"teacher": teacher()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": (pair("conv", "con"),)}, "names 'con', which is not a layer; did you mean"),
        ({"features": (pair("conv", "fc"),)}, "'fc' .*more than the width differs"),
        ({"attention": (pair("fc", "fc"),)}, "'fc', whose output .* has no positions"),
        ({"attention": (pair("conv", "fc"),)}, "more than the width differs"),
    ],
)
def test_layers_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        distilled(tmp_path, student(), block(), **options)
    assert not list((tmp_path / "state").iterdir())


def test_a_graph_has_no_parts_without_weights(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="layers with a weight of their own only; did you mean"):
        distilled(tmp_path, executing(), block(), features=(pair("body", "body"),))


def test_a_teacher_with_other_outputs(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"teacher: returns \w+ float32\[\w+, 5\], but the student"):
        distilled(tmp_path, student(), block(8, 5))


def test_a_teacher_with_other_inputs(tmp_path: Path) -> None:
    graph = block().graph().clone()
    graph.graph.inputs.append(graph.graph.inputs[0].__class__(None, name="mask"))
    with pytest.raises(CompressorError, match=r"teacher: takes x .* the student takes x"):
        distilled(tmp_path, student(), OnnxCarrier(graph))


class Numbers(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], *, logits: bool = False) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(72, 1)
        self.shape, self.logits = shape, logits

    def forward(self, x: torch.Tensor) -> Any:
        found: torch.Tensor = self.fc(x.flatten(1)).reshape(-1, *self.shape)
        return (torch.cat([found, -found], 1), found) if self.logits else found


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_numbers_are_no_logits(tmp_path: Path, shape: tuple[int, ...]) -> None:
    carrier = type(student())(Numbers(shape), student().inputs)
    message = r"soft: is kl, but output .* does not hold logits; set soft: mse"
    with pytest.raises(SpecError, match=message):
        distilled(tmp_path, carrier, carrier, alpha=0.0, soft="kl")
    with pytest.raises(SpecError, match=message):  # in the plan, too
        Distill(alpha=0.0, soft="kl", steps=1).survey(carrier, PassContext())
    chosen = Distill(alpha=0.0, steps=1)
    (note,) = chosen.survey(carrier, PassContext()).notes[:1]
    assert note == "the loss is the squared difference to the teacher's outputs"
    assert distilled(tmp_path, carrier, carrier, alpha=0.0).carrier is not None


def test_outputs_that_hold_logits_can_be_named(tmp_path: Path) -> None:
    carrier = type(student())(Numbers((1,), logits=True), student().inputs)
    with pytest.raises(
        SpecError, match=r"name those that do in outputs .the others drift., or set soft: mse"
    ):
        distilled(tmp_path, carrier, carrier, alpha=0.0, soft="kl")
    named = Distill(alpha=0.0, soft="kl", steps=1, outputs=(carrier.outputs[0].name,))
    assert "divergence" in named.survey(carrier, PassContext()).notes[0]
