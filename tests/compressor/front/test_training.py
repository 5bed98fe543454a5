"""A training loop of the program's own, between ``prepare`` and ``convert``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import compressor
from compressor import PreparedModule, RunResult, Spec
from compressor.errors import SpecError
from tests.compressor.tiny_project import sample_images, tiny_module

IMAGES = torch.from_numpy(sample_images(1))
with torch.no_grad():
    LABELS = tiny_module()(IMAGES).argmax(1).roll(1)  # something to learn
RATE, STEPS = 0.05, 4
QAT = {"pass": "qat", "activations": {"observer": "min-max"}}
BUILT_IN = {"optimizer": "sgd", "momentum": 0, "learning-rate": RATE, "schedule": "constant"}


def train(prepared: PreparedModule, steps: int = STEPS, *, own: bool = True) -> PreparedModule:
    """A plain loop, with its own loss or that of the pass."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=RATE)
    for _ in range(steps):
        outputs = prepared(IMAGES)
        loss = nn.functional.cross_entropy(outputs, LABELS) if own else prepared.loss(LABELS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return prepared


def outputs_of(result: RunResult) -> np.ndarray:
    (artifact,) = result.artifacts
    session = ort.InferenceSession(artifact.path, providers=["CPUExecutionProvider"])
    (made,) = session.run(None, {"image": IMAGES.numpy()})
    return np.asarray(made)


@pytest.fixture(scope="module")
def prepared() -> PreparedModule:
    return compressor.prepare(tiny_module(), [QAT], (IMAGES, LABELS))


@pytest.fixture(scope="module")
def untrained(prepared: PreparedModule) -> np.ndarray:
    return outputs_of(compressor.convert(prepared))


@pytest.fixture(scope="module")
def converted(prepared: PreparedModule, untrained: np.ndarray) -> RunResult:
    del untrained  # before it is trained
    return compressor.convert(train(prepared))


def test_a_plain_loop_gives_what_the_specs_own_training_gives(
    converted: RunResult, untrained: np.ndarray, tmp_path: Path
):
    data = {"factory": (IMAGES, LABELS), "batch": len(IMAGES)}
    spec = Spec(
        name="built-in",
        model=tiny_module(),
        data={"calibration": (IMAGES, LABELS), "training": data},
        passes=[{**QAT, **BUILT_IN, "epochs": STEPS}],
        exports=[{"format": "onnx", "target": "ort-cpu"}],
        output=tmp_path / "out",
    )
    theirs = outputs_of(compressor.run(spec))
    ours = outputs_of(converted)
    moved = np.abs(theirs - untrained).max()
    # Samples of a batch stand in another order, so sums differ in their last bits.
    assert np.abs(ours - theirs).max() < 0.02 * moved
    assert moved > 0.01


def test_the_report_says_who_trained(converted: RunResult):
    (entry,) = converted.report["passes"]
    assert entry["pass"] == "qat"
    assert entry["training"] is None
    assert "trained in a loop of the program's own" in entry["notes"]
    assert [layer["scheme"] for layer in entry["layers"]] == ["int8/channel"] * 3
    assert converted.output.is_dir()


def test_a_module_may_be_trained_on_and_converted_again(
    prepared: PreparedModule, converted: RunResult
):
    before = outputs_of(converted)
    again = compressor.convert(train(prepared, 1))
    assert not np.array_equal(outputs_of(again), before)


@pytest.mark.parametrize("fused", [False, True])  # fused kernels do not change versions
def test_masks_hold_in_any_loop(fused: bool):
    module = tiny_module()
    with torch.no_grad():
        module.conv2.weight[0] = 0
    zero = int((module.conv2.weight == 0).sum())
    prepared = compressor.prepare(
        module, [{"pass": "finetune", "loss": "cross-entropy"}], (IMAGES, LABELS)
    )
    settings = {"lr": RATE, "momentum": 0.9, "weight_decay": 0.1, "fused": fused}
    optimizer = torch.optim.SGD(prepared.parameters(), **settings)
    for _ in range(3):
        nn.functional.cross_entropy(prepared(IMAGES), LABELS).backward()
        with torch.no_grad():
            prepared.network.get_parameter("module.conv2.weight").grad.add_(1.0)
        optimizer.step()
    prepared.eval()
    prepared(IMAGES)  # looking at it is enough
    weight = prepared.network.get_parameter("module.conv2.weight")
    assert int((weight == 0).sum()) == zero
    assert not torch.equal(weight[1], module.conv2.weight[1])


@contextmanager
def one_process() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_sharded_parameters_are_refused():
    passes = [{"pass": "finetune", "loss": "cross-entropy"}]
    prepared = compressor.prepare(tiny_module(), passes, (IMAGES, LABELS))
    message = r"prepared module: \d+ of its \d+ parameters have been replaced since prepare"
    with one_process() as mesh:
        DistributedDataParallel(prepared)(IMAGES)  # keeps them
        around = fully_shard(nn.Sequential(prepared), mesh=mesh)
        with pytest.raises(SpecError, match=message):
            around(IMAGES)
        with pytest.raises(SpecError, match=message):
            compressor.convert(prepared)


def test_weights_are_pruned_by_steps_of_the_loop_and_go_on_where_they_were():
    pruned = {"pass": "finetune", "loss": "cross-entropy", "prune": {"target": 0.5, "every": 1}}
    with pytest.raises(SpecError, match=r"the number of steps of your loop is not set; set steps"):
        compressor.prepare(tiny_module(), [pruned], (IMAGES, LABELS))
    prepared = compressor.prepare(tiny_module(), [{**pruned, "steps": 8}], (IMAGES, LABELS))
    name = "network.module.conv2.weight"

    def zeros(module: PreparedModule) -> int:
        module.settle()
        return int((module.get_parameter(name) == 0).sum())

    counts = [zeros(train(prepared, 2)) for _ in range(2)]
    state = prepared.state_dict()
    other = compressor.prepare(tiny_module(), [{**pruned, "steps": 8}], (IMAGES, LABELS))
    other.load_state_dict(state)
    assert zeros(other) == counts[1]
    counts += [zeros(train(other, 4))]
    assert counts[0] < counts[1] < counts[2]
    assert counts[2] == pytest.approx(0.5 * prepared.get_parameter(name).numel(), rel=0.2)


def test_a_state_that_is_saved_behind_a_step_has_its_masks():
    pruned = {"pass": "finetune", "loss": "cross-entropy", "prune": {"target": 0.5, "every": 1}}
    prepared = compressor.prepare(tiny_module(), [{**pruned, "steps": 4}], (IMAGES, LABELS))
    state = train(prepared, 4).state_dict()
    weight = state["network.module.conv2.weight"]
    assert int((weight == 0).sum()) == pytest.approx(0.5 * weight.numel(), rel=0.2)
    other = compressor.prepare(tiny_module(), [{**pruned, "steps": 4}], (IMAGES, LABELS))
    other.load_state_dict(state)
    again = other.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_an_average_of_steps_and_masks_is_refused(prepared: PreparedModule):
    state = {name: tensor / 2 for name, tensor in prepared.state_dict().items()}
    with pytest.raises(SpecError, match=r"cannot read its step and masks from _extra_state"):
        prepared.load_state_dict(state)


def test_the_loss_of_distillation_is_in_the_module():
    teacher = tiny_module()
    student = tiny_module()
    with torch.no_grad():
        student.fc.weight.mul_(0.2)
    passes = [{"pass": "distill", "teacher": teacher, "alpha": 0, "soft": "mse"}]
    prepared = compressor.prepare(student, passes, IMAGES)
    with pytest.raises(SpecError, match="has no outputs yet; call the module first"):
        prepared.loss()
    made = prepared(IMAGES)
    with torch.no_grad():
        wanted = (made - teacher(IMAGES)).square().mean()
    assert prepared.loss().item() == pytest.approx(wanted.item(), rel=1e-4)
    train(prepared, 3, own=False)
    prepared(IMAGES)
    assert prepared.loss().item() < wanted.item()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor | None = None, labels: Any = None) -> Any:
        made = self.fc(x if scale is None else x * scale)
        return {"logits": made, "hidden": (x,), "loss": None if labels is None else labels}


def test_a_prepared_module_takes_and_returns_what_the_module_does():
    data = {"x": torch.rand(8, 4), "scale": torch.rand(8, 1), "labels": torch.zeros(8).long()}
    passes = [{"pass": "finetune", "loss": "cross-entropy"}]
    module = Named()
    prepared = compressor.prepare(module, passes, {n: t.numpy() for n, t in data.items()})
    assert prepared.training
    made = prepared(**data)
    assert made.keys() == {"logits", "hidden", "loss"}
    assert torch.allclose(made["logits"], module(**data)["logits"])
    assert torch.equal(made["hidden"][0], data["x"])
    assert torch.equal(prepared(data["x"], scale=data["scale"])["logits"], made["logits"])


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([{"pass": "fuse"}], "none of them trains; give one of qat, distill"),
        ([QAT, {"pass": "finetune"}], "'qat', 'finetune' train; give one"),
    ],
)
def test_one_pass_trains(passes: Any, message: str):
    with pytest.raises(SpecError, match=message):
        compressor.prepare(tiny_module(), passes, (IMAGES, LABELS))


def test_averages_are_made_of_states_as_a_copy_would_share_masks(prepared: PreparedModule):
    with pytest.raises(SpecError, match=r"cannot be copied.*state_dict"):
        AveragedModel(prepared)
    before = outputs_of(compressor.convert(prepared))
    kept = deepcopy(prepared.state_dict())
    train(prepared, 1)
    prepared.load_state_dict(kept)
    assert np.array_equal(outputs_of(compressor.convert(prepared)), before)


def test_a_prepared_module_is_taken_out_of_its_wrapper(prepared: PreparedModule):
    converted = compressor.convert(nn.DataParallel(prepared))
    assert np.array_equal(outputs_of(converted), outputs_of(compressor.convert(prepared)))


def test_what_was_not_prepared_is_not_converted() -> None:
    with pytest.raises(
        SpecError, match=r"takes what compressor\.prepare returned, .* a Sequential"
    ):
        compressor.convert(nn.Sequential())
