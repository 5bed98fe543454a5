"""A teacher's batch-norm statistics: taken anew where it teaches better, and else left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d

from compressor.errors import SpecError
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.train.distill.adaptation import adapted
from compressor.passes.train.distill.distill import Distill
from compressor.passes.train.finetune import Finetune
from compressor.types.passes import Outcome, PassContext
from tests.compressor.passes.train.distill_models import (
    Killed,
    Unlabelled,
    block,
    distilled,
    killed_at,
    same,
    student,
)
from tests.compressor.passes.train.small_training import INPUTS, Small, SmallData, training

NOTE = "the teacher's batch-norm statistics were re-estimated on the training data"
DATA = SmallData(240, noisy=True)  # 30 steps of 8 in an epoch


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> TorchCarrier:
    """Return a network that has learnt the data, without dropout."""
    torch.manual_seed(7)
    fresh = TorchCarrier(Small(dropout=0.0), INPUTS)
    given = training(tmp_path_factory.mktemp("teacher"), fresh, DATA)
    chosen = Finetune.model_validate({"epochs": 6.0, "learning_rate": 0.02})
    found = chosen.apply_training(fresh, PassContext(seed=1, metric="accuracy"), {}, given).carrier
    assert isinstance(found, TorchCarrier)
    return found


def elsewhere(teacher: TorchCarrier) -> TorchCarrier:
    """Return the teacher with statistics of other data."""
    held = {name: stored.read() for name, stored in teacher.tensors().items()}
    mean, variance = held["bn.running_mean"], held["bn.running_var"]
    moved = {"bn.running_mean": mean + 2 * variance.sqrt(), "bn.running_var": 9 * variance}
    return teacher.with_weights(moved)


def noted(outcome: Outcome) -> str:
    """Return what was done to the teacher."""
    return next((n for n in outcome.notes if n.startswith(NOTE)), "")


def taught(folder: Path, teacher: TorchCarrier, **options: Any) -> Outcome:
    """Train for a few steps."""
    return distilled(folder, student(), teacher, **{"data": DATA, "steps": 6, **options})


def test_a_teacher_of_other_data_is_adapted(tmp_path: Path, knowing: TorchCarrier) -> None:
    strange = elsewhere(knowing)
    note = noted(taught(tmp_path / "found", strange))
    after, before = note.partition(" is ")[2].split(", and was ")
    assert note.startswith(f"{NOTE}: its loss on 64 other samples of them is ")
    assert float(after) < float(before)
    left = taught(tmp_path / "left", strange, adapt_teacher=False)
    wished = taught(tmp_path / "wished", strange, adapt_teacher=True)
    assert not noted(left)
    assert noted(wished) == NOTE
    assert same(wished, taught(tmp_path / "again", strange))
    assert not same(wished, left)


def test_the_statistics_are_those_of_the_first_steps(tmp_path: Path, knowing: TorchCarrier) -> None:
    strange = elsewhere(knowing)
    course = Distill(steps=6).course(training(tmp_path, student(), DATA), INPUTS, 3)
    name = strange.outputs[0].name
    found, note = adapted(True, strange, INPUTS, {name: name}, None, course)
    assert note == NOTE
    steps = [DATA.batch(course.order.rows(step), (3, step, 0))["x"] for step in range(16)]
    held = {name: stored.read() for name, stored in strange.tensors().items()}
    images = torch.from_numpy(np.concatenate(steps))
    before = conv2d(images, held["conv.weight"], held["conv.bias"]).double()
    after = {name: stored.read().double() for name, stored in found.tensors().items()}
    assert torch.allclose(after["bn.running_mean"], before.mean((0, 2, 3)), atol=1e-5)
    wanted = before.var((0, 2, 3), unbiased=False)
    assert torch.allclose(after["bn.running_var"], wanted, rtol=1e-4)
    assert torch.equal(after["fc.weight"], held["fc.weight"].double())


def test_a_teacher_that_knows_the_data_stays(tmp_path: Path, knowing: TorchCarrier) -> None:
    asked = taught(tmp_path / "asked", knowing)
    assert not noted(asked)
    assert same(asked, taught(tmp_path / "left", knowing, adapt_teacher=False))


def test_without_labels_nothing_is_decided(tmp_path: Path, knowing: TorchCarrier) -> None:
    options: dict[str, Any] = {"data": Unlabelled(240), "alpha": 0.0}
    strange = elsewhere(knowing)
    assert not noted(taught(tmp_path / "asked", strange, **options))
    assert noted(taught(tmp_path / "wished", strange, **options, adapt_teacher=True)) == NOTE


def test_few_samples_decide_nothing(tmp_path: Path, knowing: TorchCarrier) -> None:
    few = SmallData(16, noisy=True)  # two steps in an epoch
    assert not noted(taught(tmp_path / "asked", elsewhere(knowing), data=few))
    assert noted(taught(tmp_path / "wished", elsewhere(knowing), data=few, adapt_teacher=True))


def test_a_teacher_without_norms(tmp_path: Path) -> None:
    assert not noted(taught(tmp_path / "asked", block()))
    with pytest.raises(SpecError, match="has no batch normalization to adapt"):
        taught(tmp_path / "wished", block(), adapt_teacher=True)


def test_a_resumed_training_ends_in_the_same_bytes(tmp_path: Path, knowing: TorchCarrier) -> None:
    strange = elsewhere(knowing)
    whole = taught(tmp_path / "whole", strange, save_every=2)
    with pytest.raises(Killed):
        taught(tmp_path / "broken", strange, save_every=2, stage=killed_at(5))
    resumed = taught(tmp_path / "broken", strange, save_every=2)
    assert noted(resumed)
    assert same(resumed, whole)


PLANNED = "the teacher's batch-norm statistics are re-estimated on the training data"


def planned(source: TorchCarrier, **options: Any) -> str:
    """Return what a plan says of the teacher."""
    context = PassContext(seed=1, metric="accuracy", source=source)
    notes = Distill.model_validate(options).survey(student(), context).notes
    return next((n for n in notes if n.startswith(PLANNED)), "")


def test_the_plan_says_that_a_teacher_may_be_adapted() -> None:
    assert planned(student()) == (
        f"{PLANNED} if its loss against the target falls by that (adapt-teacher: false keeps them)"
    )
    assert planned(student(), adapt_teacher=True, alpha=0.0) == PLANNED
    named = {"factory": "models:large"}
    assert planned(block(), teacher=named)  # it is not opened yet
    assert not planned(block())
    assert not planned(student(), adapt_teacher=False)
    assert not planned(student(), alpha=0.0)


def test_the_plan_refuses_a_teacher_that_cannot_be_adapted() -> None:
    with pytest.raises(SpecError, match="has no batch normalization to adapt"):
        planned(block(), adapt_teacher=True)
    wished = Distill.model_validate({"adapt_teacher": True, "teacher": {"onnx": "large.onnx"}})
    wished.check_models(student(), {"teacher": student()})
    with pytest.raises(SpecError, match="has no batch normalization to adapt"):
        wished.check_models(student(), {"teacher": block()})
