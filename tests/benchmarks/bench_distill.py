"""ResNet-20 at half of its multiply-accumulates: two epochs with a teacher and without.

Tables, no assertions. Pruned by prune-structured with its defaults, then trained for two epochs
with the defaults of finetune and of distill, where the teacher is the network before it was pruned,
and by gradient descent with momentum. The teacher's statistics are those of other images than these
copies; "left alone" keeps them. Any training on these images makes the float network better, too:
the control is that one, trained the same way. The time of a step is that of both passes in turn,
with the teacher's outputs in the cache and without.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from compressor import catalog
from compressor.calibration.collect import collect_statistics
from compressor.graph.costs import macs
from compressor.models.torch.carrier import TorchCarrier
from compressor.progress import nobody_watches
from compressor.run.evaluate import RunSamples
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.types.data import ALONE
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch
from compressor.types.training import Advance, Rows, Training, TrainingData
from samples.cifar.data import augment
from tests.benchmarks.bench_prune_resnet20 import (
    BATCH,
    EPOCHS,
    MOMENTUM,
    RATE,
    SEEDS,
    TARGET,
    accuracy,
    images,
    ours,
    published,
)
from tests.benchmarks.bench_prune_resnet20 import pytestmark as pytestmark
from tests.benchmarks.bench_resnet20 import show

MOMENTUM_RECIPE = {"optimizer": "sgd", "learning_rate": RATE, "momentum": MOMENTUM}
TIMED_STEPS = 6
ROUNDS = 5


class Images:
    """The training images, flipped and cropped at random."""

    target: str | None = "label"
    digest = "cifar10_train4000"
    random = True

    def __init__(self) -> None:
        self._arrays = images("cifar10_train4000.npz")
        self.samples = len(self._arrays["label"])

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples, transformed."""
        rng = np.random.default_rng(tuple(seed))
        return augment({name: array[rows] for name, array in self._arrays.items()}, rng)


def no_model(keys: Any, where: str) -> NoReturn:
    """Open nothing."""
    raise AssertionError((keys, where))


@contextmanager
def quiet(description: str, total: int) -> Iterator[Advance]:
    """Show nothing."""
    del description, total
    yield nobody_watches


def training(
    folder: Path, cache: Path, source: TorchCarrier, data: TrainingData | None = None
) -> Training:
    """Return what a run would hand to a pass; the data are the images if none are given."""
    for path in (folder, cache):
        path.mkdir(parents=True, exist_ok=True)
    return Training(
        data=data or Images(),
        batch=BATCH,
        metric=ACCURACY,
        folder=folder,
        cache=cache,
        source=source,
        open_model=no_model,
        samples=RunSamples(source.inputs, None, 0),
        collect=collect_statistics,
        ranks=ALONE,
        stage=quiet,
        load_symbol=no_model,
    )


def trained(name: str, carrier: TorchCarrier, seed: int, given: Training, **own: Any) -> Any:
    """Train by one of the passes."""
    length = {} if "steps" in own else {"epochs": float(EPOCHS)}
    chosen = catalog.load("pass", name).model_validate({**length, "save_every": 1_000_000, **own})
    return chosen.apply_training(carrier, PassContext(seed, metric="accuracy"), {}, given)


@pytest.mark.parametrize(
    ("network", "name", "own"),
    [
        ("float", "finetune", {}),
        ("pruned", "finetune", {}),
        ("pruned", "distill", {}),
        ("pruned", "distill", {"adapt_teacher": False}),
        ("pruned", "distill", MOMENTUM_RECIPE),
    ],
    ids=["control", "finetune", "distill", "left-alone", "momentum"],
)
def test_two_epochs(tmp_path: Path, network: str, name: str, own: dict[str, Any]) -> None:
    teacher, test = published(), images("cifar10_test2000.npz")
    carrier = teacher
    if network == "pruned":
        carrier = ours(teacher, "sensitivity", TARGET, [], solved=True).carrier
    found = []
    for seed in SEEDS:
        given = training(tmp_path / str(seed), tmp_path / "cache", teacher)
        outcome = trained(name, carrier, seed, given, **own)
        found.append(accuracy(outcome.carrier.module, test))
    show(
        f"ResNet-20, top-1 % on 2,000 images; {EPOCHS} epochs, {len(SEEDS)} seeds",
        ["network", "MACs", "before", "trained by", "with", "mean", "range"],
        [
            [
                network,
                f"{macs(carrier.graph()) / macs(teacher.graph()):.3f}",
                f"{accuracy(carrier.module, test):.2f}",
                name,
                ", ".join(f"{key} {value}" for key, value in own.items()) or "its defaults",
                f"{np.mean(found):.2f}",
                f"{min(found):.2f}-{max(found):.2f}",
            ]
        ],
    )


def step_times(name: str, carrier: TorchCarrier, given: Training, **own: Any) -> list[float]:
    """Return the milliseconds of each step but the first."""
    marks: list[float] = []

    @contextmanager
    def stage(description: str, total: int) -> Iterator[Advance]:
        del description, total

        def advance(done: int, text: str = "") -> None:
            del done, text
            marks.append(time.perf_counter())

        yield advance

    steps = {"steps": TIMED_STEPS}
    trained(name, carrier, 0, replace(given, stage=stage), **{**steps, **own})
    return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]


def test_time_of_a_step(tmp_path: Path) -> None:
    teacher = published()
    pruned = ours(teacher, "sensitivity", TARGET, []).carrier
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "finetune": ("finetune", {}),
        "distill, outputs cached": ("distill", {}),
        "distill, not cached": ("distill", {"cache": False}),
    }
    fill = training(tmp_path / "fill", tmp_path / "cache", teacher)
    step_times("distill", pruned, fill)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS):
        for kind, (name, own) in kinds.items():
            given = training(tmp_path / f"{kind}-{turn}", tmp_path / "cache", teacher)
            found[kind].append(min(step_times(name, pruned, given, **own)))
    best = {kind: min(times) for kind, times in found.items()}
    ratios = {
        kind: sorted(a / b for a, b in zip(times, found["finetune"], strict=True))
        for kind, times in found.items()
    }
    show(
        f"a step of {BATCH} images on the pruned network; least of {ROUNDS} x {TIMED_STEPS - 1}, "
        f"in turn, {torch.get_num_threads()} thread(s)",
        ["step", "ms", "of finetune", "in turn: median (range)"],
        [
            [
                kind,
                f"{best[kind]:.1f}",
                f"{best[kind] / best['finetune']:.3f}",
                f"{ratio[len(ratio) // 2]:.3f} ({ratio[0]:.3f}-{ratio[-1]:.3f})",
            ]
            for kind, ratio in ratios.items()
        ],
    )
