"""The moving average of weights, mixup, and what a training writes while it goes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compressor.errors import DataError, InputError, SpecError
from compressor.passes.train import altered_modules, logs
from compressor.passes.train.averages import Average
from compressor.passes.train.finetune import Finetune, TaskLoss
from compressor.passes.train.job import Micro, Order, Steps
from compressor.passes.train.logs import Log, TrainingLog
from compressor.passes.train.losses import cross_entropy
from compressor.passes.train.mixup import Mixed, mixup_of
from compressor.types.tensors import TensorSpec
from compressor.types.training import TrainingStep
from tests.compressor.passes.train.small_training import INPUTS, SmallData, small, training
from tests.compressor.passes.train.test_finetune import (
    CONTEXT,
    Killed,
    ending_at,
    same,
    state,
    tuned,
)


def test_an_average_is_the_sum_of_what_was_weighted_by_decay():
    module = nn.Linear(3, 2)
    average = Average(module, 0.75)
    expected = module.weight.detach().clone().double()
    for step in range(40):
        with torch.no_grad():
            module.weight.copy_(torch.randn(2, 3, generator=torch.Generator().manual_seed(step)))
        average.after(step)
        kept = min(0.75, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * module.weight.detach().double()
    torch.testing.assert_close(average.weights()["weight"].double(), expected, atol=1e-6, rtol=0)
    live = module.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(module.weight.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(module.weight, live)
    average.restart(40)
    assert torch.equal(average.weights()["weight"], live)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_average_of_weights_of_16_bits_arrives(dtype: torch.dtype):
    """In their own type, a thousandth of the way was less than they show, so it stood still."""
    module = nn.Linear(8, 8).to(dtype)
    average, start = Average(module, 0.99), module.weight.detach().clone()
    for step in range(1500):
        with torch.no_grad():
            module.weight.copy_(start.float() * (1 + min(step, 500) / 1000))
        average.after(step)
    weight = average.weights()["weight"]
    assert weight.dtype == dtype
    torch.testing.assert_close(weight, module.weight.detach(), rtol=1e-2, atol=0)


def test_pruned_weights_are_zero_in_an_average():
    module = nn.Linear(4, 4)
    average = Average(module, 0.9)
    with torch.no_grad():
        module.weight[1, 2] = 0  # pruned now; the average still remembers it
    average.after(0)
    assert average.weights()["weight"].eq(0).sum() == 1


def test_a_finetuning_keeps_the_average(tmp_path: Path):
    last = state(tuned(tmp_path / "last"))
    averaged = state(tuned(tmp_path / "averaged", ema=0.9))
    start = dict(small().module.state_dict())
    moved = {n: (t - start[n]).abs().sum() for n, t in last.items() if t.is_floating_point()}
    less = {n: (averaged[n] - start[n]).abs().sum() for n in moved}
    assert averaged["bn.num_batches_tracked"] == 12
    assert sum(less.values()) < 0.95 * sum(moved.values())  # an average lags behind
    assert all(value > 0 for value in less.values())


def test_the_average_survives_an_interruption(tmp_path: Path):
    options: dict[str, Any] = {"ema": 0.9, "validation": 0.2, "save_every": 5}
    whole = state(tuned(tmp_path / "whole", **options))
    with pytest.raises(Killed):
        tuned(tmp_path / "broken", stage=ending_at(7, "killed"), **options)
    assert same(state(tuned(tmp_path / "broken", **options)), whole)


def test_mixup_blends_inputs_and_losses():
    data, order = SmallData(noisy=False), Order(40, 8, seed=5)
    mixup = mixup_of(0.4, INPUTS, "label")
    plain = Steps(data, order, 3, 0)[2]
    mixed = Steps(data, order, 3, 0, mixup)[2]
    again = Steps(data, order, 8, 0, mixup)[2]
    assert isinstance(plain, tuple)
    assert isinstance(mixed, tuple)
    assert isinstance(again, tuple)
    blend = again[0].mixed
    assert blend is not None
    assert blend.partners is not None
    assert 0 < blend.share < 1
    images = torch.cat([micro.tensors["x"] for micro in plain])
    labels = torch.cat([micro.tensors["label"] for micro in plain])
    blended = torch.cat([micro.tensors["x"] for micro in mixed])
    assert torch.equal(blended, again[0].tensors["x"])  # whatever the parts
    # Each sample is its share of itself, and the rest of one of the step's, whose label it has.
    partners = (blended - blend.share * images) / (1 - blend.share)
    distance = torch.cdist(partners.flatten(1), images.flatten(1))
    assert distance.min(dim=1).values.max() < 1e-4
    assert torch.equal(labels[distance.argmin(dim=1)], blend.partners)
    parts = [micro.mixed.partners for micro in mixed if micro.mixed is not None]
    assert torch.equal(torch.cat([p for p in parts if p is not None]), blend.partners)


def test_a_mixed_loss_is_that_of_both_labels(tmp_path: Path):
    logits = torch.randn(2, 3)
    target, partners = torch.tensor([0, 1]), torch.tensor([2, 1])
    loss = TaskLoss("cross-entropy", ["y"], training(tmp_path, small()))
    micro = Micro(np.arange(2), {"label": target}, Mixed(0.3, partners))
    found = loss.losses({"y": logits}, micro, 0)["loss"]
    both = 0.3 * cross_entropy(logits, target) + 0.7 * cross_entropy(logits, partners)
    torch.testing.assert_close(found, both)


def test_mixup_changes_what_is_learnt(tmp_path: Path):
    plain, mixed = (state(tuned(tmp_path / str(a), mixup=a)) for a in (0.0, 1.0))
    assert not same(plain, mixed)


def test_tokens_are_not_blended():
    with pytest.raises(SpecError, match=r"mixup: is 0\.2, but input 'ids' holds int64"):
        mixup_of(0.2, [TensorSpec("ids", ("batch", 8), "int64")], "label")


def test_norms_over_processes_are_those_of_one_batch(monkeypatch: pytest.MonkeyPatch):
    """One process of its own; two are compared with one in test_distributed.py."""
    monkeypatch.setattr(altered_modules.dist, "all_reduce", lambda tensor: tensor)
    images = torch.randn(6, 3, 4, 4)
    results = []
    for synchronized in (False, True):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))
        if synchronized:
            altered_modules.synchronize_norms(module)
        module(images).square().mean().backward()
        parameters = [p.grad for p in module.parameters()]
        results.append([*parameters, *module.state_dict().values(), module.eval()(images)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(SpecError, match="has no batch norm"):
        altered_modules.synchronize_norms(nn.Linear(2, 2))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_log_has_each_step_once(tmp_path: Path):
    def go(place: str, **options: Any) -> None:
        start = small()
        log = {"csv": f"../{place}.csv"}
        options = {"steps": 12, "learning_rate": 0.05, "validation": 0.2, "save_every": 5} | options
        stage = {"stage": options.pop("stage")} if "stage" in options else {}
        given = training(tmp_path / place, start, **stage)
        vars(given)["base"] = tmp_path / "specs"
        chosen = Finetune.model_validate({**options, "log": log})
        chosen.apply_training(start, CONTEXT, {}, given)

    (tmp_path / "specs").mkdir()
    go("whole")
    with pytest.raises(Killed):
        go("broken", stage=ending_at(8, "killed"))
    go("broken")
    whole = rows(tmp_path / "whole.csv")
    assert [int(row["step"]) for row in whole] == list(range(1, 13))
    assert rows(tmp_path / "broken.csv") == whole
    assert [row["step"] for row in whole if row["validation"]] == ["4", "8", "12"]
    assert float(whole[0]["learning-rate"]) == 0.05
    assert 0 < float(whole[-1]["learning-rate"]) < 0.01


def test_a_log_keeps_the_rows_of_others(tmp_path: Path):
    path = tmp_path / "log.csv"

    def write(name: str, terms: dict[str, float]) -> None:
        with TrainingLog(Log(csv="log.csv"), tmp_path, 0, name) as log:
            log(TrainingStep(name.split()[0], 1, 2, 0.5, terms, 0.1))

    write("distill", {"hard": 0.2, "soft": 0.3})
    for name in ("finetune", "finetune", "finetune 2"):
        write(name, {"loss": 0.5})
    assert [(r["pass"], r["hard"]) for r in rows(path)] == [
        ("distill", "0.2"),
        ("finetune", ""),
        ("finetune 2", ""),
    ]
    path.write_text("name,price\npear,2\n")
    with pytest.raises(InputError, match="is no log of a training"):
        write("finetune", {"loss": 0.5})
    assert path.read_text() == "name,price\npear,2\n"


def test_tensorboard_reads_what_was_logged(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TrainingLog(Log(tensorboard="events"), tmp_path, 0, "qat") as log:
        for step in (1, 2, 3):
            log(TrainingStep("qat", step, 3, 1 / step, {"loss": 1 / step}, 0.1, validation=0.5))
    with TrainingLog(Log(tensorboard="events"), tmp_path, 2, "qat") as log:  # the third step again
        log(TrainingStep("qat", 3, 3, 0.25, {"loss": 0.25}, 0.1))
    with TrainingLog(Log(tensorboard="events"), tmp_path, 0, "qat 2") as log:
        log(TrainingStep("qat", 1, 3, 9.0, {"loss": 9.0}, 0.1))
    read = EventAccumulator(str(tmp_path / "events" / "qat"))
    read.Reload()
    losses = {event.step: event.value for event in read.Scalars("qat/loss")}
    assert losses == {1: 1.0, 2: 0.5, 3: 0.25}
    assert {"qat/learning-rate", "qat/validation"} < set(read.Tags()["scalars"])


def test_tensorboard_has_to_be_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "find_spec", lambda _: None)
    with pytest.raises(ValidationError, match=r'run pip install "compressor\[tensorboard\]"'):
        Finetune.model_validate({"log": {"tensorboard": "events"}})
    with pytest.raises(ValidationError, match="names no file"):
        Finetune.model_validate({"log": {}})


def test_callbacks_are_told_of_each_step(tmp_path: Path):
    seen: list[TrainingStep] = []

    def note(step: TrainingStep) -> None:
        seen.append(step)
        if step.step == 3:
            raise DataError("callback", "has seen enough", "go home")

    start = small()
    given = training(tmp_path, start)
    vars(given)["callbacks"] = (note,)
    chosen = Finetune.model_validate({"steps": 12, "learning_rate": 0.05})
    with pytest.raises(DataError, match="has seen enough"):
        chosen.apply_training(start, CONTEXT, {}, given)
    assert [step.step for step in seen] == [1, 2, 3]
    assert seen[0].steps == 12
    assert seen[0].loss == pytest.approx(sum(seen[0].terms.values()))
