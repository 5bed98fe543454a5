"""Teachers and students for tests of ``distill``, and the means to train them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.train.distill.distill import Distill
from compressor.types.carrier import Carrier
from compressor.types.passes import Outcome, PassContext
from compressor.types.training import Advance, OpenModel
from tests.compressor.passes.train.small_training import CLASSES, INPUTS, SmallData, small, training

CONTEXT = PassContext(seed=3, metric="accuracy")


class Block(nn.Module):
    """Two convolutions of so many channels, pooling and a head."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.conv = nn.Conv2d(2, width, 3)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 2, 6, 6]`` to logits."""
        found: Tensor = self.fc(self.body(torch.relu(self.conv(x))).mean((2, 3)))
        return found


@cache
def block(width: int = 8, classes: int = CLASSES) -> TorchCarrier:
    """Return a network whose weights are always the same; larger ones than at the start."""
    torch.manual_seed(width)
    module = Block(width, classes)
    with torch.no_grad():
        module.fc.weight.mul_(10)
    return TorchCarrier(module, INPUTS)


@cache
def student() -> TorchCarrier:
    """Return the small network."""
    return small()


@cache
def executing() -> TorchCarrier:
    """Return a small network that executes its graph, as after structured pruning."""
    carrier = block(4).with_trainable_graph(block(4).graph(), ())
    assert isinstance(carrier, TorchCarrier)
    return carrier


@cache
def as_onnx(width: int = 8) -> OnnxCarrier:
    """Return the network as an ONNX file gives it."""
    return OnnxCarrier(block(width).graph())


class Unlabelled(SmallData):
    """The images alone."""

    target = None

    def batch(self, rows: Any, seed: Any) -> dict[str, Any]:
        """Return images."""
        return {"x": super().batch(rows, seed)["x"]}


def opening(models: Mapping[str, Carrier]) -> OpenModel:
    """Return what opens models by their factory or file."""

    def open_model(keys: Mapping[str, Any], where: str) -> Carrier:
        del where
        return models[keys.get("factory") or keys["onnx"]]

    return open_model


def distilled(
    folder: Path,
    carrier: Carrier,
    source: Carrier,
    models: Mapping[str, Carrier] | None = None,
    **options: Any,
) -> Outcome:
    """Train with a teacher; data, metric and stage go to the training."""
    own = {k: options.pop(k) for k in ("data", "metric", "stage") if k in options}
    seed = options.pop("seed", CONTEXT.seed)
    chosen = Distill.model_validate({"steps": 12, "learning_rate": 0.05, **options})
    given = replace(
        training(folder, student(), **own), source=source, open_model=opening(models or {})
    )
    metric = own["metric"].name if own.get("metric") else CONTEXT.metric
    return chosen.apply_training(carrier, PassContext(seed=seed, metric=metric), {}, given)


def state(outcome: Outcome) -> dict[str, Tensor]:
    """Return the trained tensors."""
    return {name: stored.read() for name, stored in outcome.carrier.tensors().items()}


def same(left: Outcome, right: Outcome) -> bool:
    """Tell whether two trainings ended in the same bytes."""
    ours, theirs = state(left), state(right)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def counted(outcome: Outcome) -> tuple[int, int]:
    """Return how many samples the teacher computed, and how many came from the cache."""
    words = next(n for n in outcome.notes if n.startswith("teacher outputs")).split()
    return int(words[2]), int(words[5])


def term(outcome: Outcome, name: str) -> float:
    """Return one of the loss's terms at the last step."""
    note = next(n for n in outcome.notes if n.startswith("loss at the last step"))
    terms = dict(part.split() for part in note.partition(": ")[2].split(", "))
    return float(terms[name])


def divergence(carrier: Carrier, teacher: Carrier) -> float:
    """Return how far a network's probabilities are from a teacher's, on the images."""
    batch = {"x": SmallData(noisy=False).images}
    ours, theirs = (
        torch.log_softmax(torch.from_numpy(next(iter(c.runner().run(batch).values()))), 1)
        for c in (carrier, teacher)
    )
    return float((theirs.exp() * (theirs - ours)).sum(1).mean())


class Killed(BaseException):
    """Ends a training as a signal that cannot be caught would."""


def killed_at(step: int, stage_number: int = 0, name: str = "distill") -> Any:
    """Return a stage that ends the process after a step of one of the trainings."""
    begun = -1

    @contextmanager
    def stage(description: str, total: int) -> Iterator[Advance]:
        nonlocal begun
        del total
        begun += description == name
        own = begun == stage_number and description == name

        def advance(done: int, text: str = "") -> None:
            del text
            if own and done == step:
                raise Killed

        yield advance

    return stage


def noise(seed: int, *shape: int) -> np.ndarray:
    """Return random numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
