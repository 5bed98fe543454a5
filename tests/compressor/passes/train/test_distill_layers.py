"""Layers of student and teacher that are compared, and assistants between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.passes.train.distill.distill import Distill
from compressor.passes.train.distill.taps import (
    LayerPair,
    Pairs,
    Student,
    fit_widths,
    layer_values,
    make_student,
)
from compressor.passes.train.job import Trained
from compressor.types.carrier import Carrier
from tests.compressor.passes.train.distill_models import (
    Killed,
    Unlabelled,
    as_onnx,
    block,
    counted,
    distilled,
    divergence,
    killed_at,
    noise,
    same,
    state,
    student,
    term,
)
from tests.compressor.passes.train.small_training import SmallData

PLAIN = SmallData(40, noisy=False)
CONV = {"student": "conv", "teacher": "conv"}
MODELS: dict[str, Carrier] = {"my:large": block(7), "my:middle": block(6)}


@pytest.mark.parametrize("kind", ["features", "attention"])
@pytest.mark.parametrize("place", ["conv", "body"])
def test_layers_are_drawn_to_the_teachers(tmp_path: Path, kind: str, place: str) -> None:
    options: dict[str, Any] = {
        kind: ({"student": place, "teacher": place, "weight": 100.0},),
        "data": PLAIN,
    }
    first = distilled(tmp_path / "first", block(4), block(), steps=1, **options)
    last = distilled(tmp_path / "last", block(4), block(), steps=60, **options)
    assert term(last, kind) < 0.6 * term(first, kind)
    assert state(last).keys() == block(4).tensors().keys()  # no projection is left


@pytest.mark.parametrize("kind", ["features", "attention"])
def test_a_weight_of_a_pair_multiplies_its_term(tmp_path: Path, kind: str) -> None:
    found = []
    for weight in (1.0, 3.0):
        pairs = ({**CONV, "weight": weight}, {**CONV, "weight": weight})
        folder = tmp_path / str(weight)
        options: dict[str, Any] = {"steps": 1, "data": PLAIN, kind: pairs}
        outcome = distilled(folder, student(), block(), **options)
        found.append(term(outcome, kind))
    assert found[1] == pytest.approx(3 * found[0], rel=1e-3)


def test_a_projection_is_trained_with_the_student() -> None:
    pairs = Pairs((LayerPair(student="conv", teacher="conv"),))
    module = make_student(block(4), pairs)
    assert isinstance(module, Student)
    images = torch.from_numpy(noise(0, 3, 2, 6, 6))
    fit_widths(module, pairs, module(x=images), {"conv": torch.zeros(3, 8, 4, 4)})
    found = module(x=images)
    assert found["feature:0"].shape == (3, 8, 4, 4)
    trained = dict(module.named_parameters())
    names = [n for n in trained if n.startswith("projections")]
    assert len(names) == 2
    wanted = [trained[n] for n in (*names, "module.conv.weight")]
    gradients = torch.autograd.grad(found["feature:0"].square().sum(), wanted)
    assert all(gradient.any() for gradient in gradients)


def test_a_student_gives_what_its_layers_put_out() -> None:
    pairs = Pairs(
        (LayerPair(student="conv", teacher="conv"),), (LayerPair(student="body", teacher="conv"),)
    )
    module = make_student(block(4), pairs)
    images = torch.from_numpy(noise(0, 3, 2, 6, 6))
    found = module(x=images)
    plain = block(4).module
    conv = plain.get_submodule("conv")(images)
    torch.testing.assert_close(found["feature:0"], conv)
    torch.testing.assert_close(found["attention:0"], plain.get_submodule("body")(conv.relu()))
    assert not any(m._forward_hooks for m in module.modules())


def test_a_graph_gives_products_with_their_bias() -> None:
    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.up(x))

    carrier = type(student())(Tokens(), student().inputs)
    assert "up" in {layer.name for layer in carrier.layers()}
    (value,) = layer_values(["up"], carrier, "features")
    images = noise(0, 3, 2, 6, 6)
    found = carrier.runner([value]).run({"x": images})[value]
    wanted = carrier.module.get_submodule("up")(torch.from_numpy(images))
    torch.testing.assert_close(torch.from_numpy(found), wanted)


def test_a_value_of_an_onnx_file_is_a_layer_too(tmp_path: Path) -> None:
    relu = next(n.outputs[0].name for n in as_onnx().graph().graph if n.op_type == "Relu")
    pairs = ({"student": "conv", "teacher": relu},)
    options: dict[str, Any] = {"features": pairs, "teacher": {"onnx": "t"}, "data": PLAIN}
    outcome = distilled(tmp_path, student(), block(), {"t": as_onnx()}, steps=2, **options)
    assert term(outcome, "features") > 0


def assisted(folder: Path, **options: Any) -> Any:
    """Train with two assistants, of which the second is small."""
    assistants = ({"factory": "my:large", "epochs": 1.2}, {"factory": "my:middle", "epochs": 0.8})
    own = {"assistants": assistants, "save_every": 2, "steps": 8, **options}
    return distilled(folder, student(), block(), MODELS, **own)


def test_assistants_are_taught_from_large_to_small(tmp_path: Path) -> None:
    outcome = assisted(tmp_path)
    lengths = [n.partition(" over ")[2] for n in outcome.notes if " over " in n]
    assert lengths == ["6 steps", "4 steps", "8 steps"]
    assert outcome.notes[0].startswith("assistants.0: loss ")
    option = {"assistants": ({"factory": "my:large"},)}
    assert Distill.model_validate(option).other_models == {"assistants.0": {"factory": "my:large"}}


def test_the_last_assistant_teaches(tmp_path: Path) -> None:
    ready = ({"factory": "my:middle", "epochs": 0},)
    outcome = distilled(
        tmp_path,
        block(4),
        block(),
        MODELS,
        alpha=0.0,
        assistants=ready,
        steps=100,
        data=Unlabelled(noisy=False),
    )
    assert divergence(outcome.carrier, block(6)) < 0.3 * divergence(outcome.carrier, block())
    assert counted(outcome) == (40, 800)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_kill_in_any_training_changes_nothing(tmp_path: Path, number: int) -> None:
    whole = assisted(tmp_path / "whole")
    with pytest.raises(Killed):
        assisted(tmp_path / "broken", stage=killed_at(3, number))
    done = [p.parent.name for p in (tmp_path / "broken").glob("state/*/done")]
    assert sorted(done) == [f"assistant-{i}" for i in range(number)]
    resumed = assisted(tmp_path / "broken")
    assert same(resumed, whole)
    assert any("resumed from the state saved after step 2" in note for note in resumed.notes)
    assert not list((tmp_path / "broken").glob("state/*/state"))


def test_what_is_trained_beside_the_model_is_no_part_of_it() -> None:
    own = {"module.fc.bias": torch.ones(3), "fc.bias": torch.zeros(3)}
    trained = Trained(own, (1.0,), {}, (), 1, 0)
    found = Distill().outcome(student(), trained, None)
    assert bool((state(found)["fc.bias"] == 1).all())
