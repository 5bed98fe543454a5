"""Channels removed at once and in rounds, and weights zeroed in rounds, with rewinding and without.

Tables, no assertions; every way has the same number of epochs in all. The networks are those of the
samples. Channels: ``prune-structured`` and ``distill``, each with its defaults, once or in turn;
each time the same share of what is left goes. Rewound, the channels are chosen on the network that
was trained, and those that remain go back to the weights of the float network, solved anew, as
J. Frankle and M. Carbin do with single weights (The lottery ticket hypothesis, 2019,
arXiv:1803.03635); trained first, each training comes before its pruning, as there. Zeros:
``finetune`` with ``prune``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from compressor import catalog
from compressor.graph.costs import macs
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.structured import structured
from compressor.passes.prune.structured.segments import Variant
from compressor.types.data import Samples
from compressor.types.passes import PassContext
from compressor.types.training import TrainingData
from samples.digits.model import digits_net
from tests.benchmarks import bench_distill, bench_prune_untuned
from tests.benchmarks.bench_prune_resnet20 import Calibration, images, published
from tests.benchmarks.bench_prune_resnet20 import accuracy as accuracy_of_images
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark, needs

pytestmark = benchmark(seconds=7200)
SEEDS = (0, 1, 2)
ZEROS = 0.98

Way: TypeAlias = Callable[["Case", int], TorchCarrier]


@dataclass(frozen=True, eq=False)
class Case:
    """A network with data, the share of its multiply-accumulates that is to remain, and epochs."""

    start: TorchCarrier
    data: TrainingData
    samples: Samples
    accuracy: Callable[[TorchCarrier], float]
    batch: int
    share: float
    epochs: float
    folder: Path

    def pruned(self, carrier: TorchCarrier, share: float) -> TorchCarrier:
        """Prune to a share of the multiply-accumulates of the case's network."""
        return removed(self, carrier, share)[0]

    def trained(self, carrier: TorchCarrier, epochs: float, seed: int) -> TorchCarrier:
        """Train for a part of the epochs, taught by the case's network."""
        own = {"epochs": epochs, "save_every": 1_000_000, "cache": False}
        after: TorchCarrier = self.by("distill", carrier, seed, own)
        return after

    def by(self, name: str, carrier: TorchCarrier, seed: int, own: Mapping[str, Any]) -> Any:
        """Train by a pass, with a folder of its own."""
        folder = self.folder / str(len([*self.folder.iterdir()]))
        given = bench_distill.training(folder / "state", folder / "cache", self.start, self.data)
        declared = catalog.load("pass", name).model_validate(own)
        context = PassContext(seed, metric="accuracy")
        given = replace(given, batch=self.batch)
        return declared.apply_training(carrier, context, {}, given).carrier


def removed(
    case: Case, carrier: TorchCarrier, share: float, chosen: Variant | None = None
) -> tuple[TorchCarrier, Variant]:
    """Prune a network; return it with what was chosen, or remove what was chosen elsewhere."""
    left = share * macs(case.start.graph()) / macs(carrier.graph())
    options = structured.PruneStructured.model_validate({"target": {"macs": left}})
    context = PassContext(samples=case.samples)
    found: list[Variant] = []

    class Chosen(structured._Pruning):
        def _chosen(self, *given: Any) -> Variant:
            found.append(super()._chosen(*given) if chosen is None else chosen)
            return found[0]

    outcome = Chosen(options, carrier, context, {}, case.samples).outcome()
    assert isinstance(outcome.carrier, TorchCarrier)
    return outcome.carrier, found[0]


def at_once(case: Case, seed: int) -> TorchCarrier:
    """Prune, then train."""
    return case.trained(case.pruned(case.start, case.share), case.epochs, seed)


def in_rounds(rounds: int) -> Way:
    """Prune and train in turn; each training has an equal part of the epochs."""

    def way(case: Case, seed: int) -> TorchCarrier:
        carrier = case.start
        for done in range(1, rounds + 1):
            carrier = case.pruned(carrier, case.share ** (done / rounds))
            carrier = case.trained(carrier, case.epochs / rounds, seed + 1000 * (done - 1))
        return carrier

    return way


def rewound(rounds: int) -> Way:
    """Do the same, each training beginning with the weights of the float network."""

    def way(case: Case, seed: int) -> TorchCarrier:
        trained = start = case.start
        for done in range(1, rounds + 1):
            share = case.share ** (done / rounds)
            _, chosen = removed(case, trained, share)
            start, _ = removed(case, start, share, chosen)
            trained = case.trained(start, case.epochs / rounds, seed + 1000 * (done - 1))
        return trained

    return way


def trained_first(case: Case, seed: int) -> TorchCarrier:
    """Train the whole network for half of the epochs, prune it, and train it for the rest."""
    carrier = case.trained(case.start, case.epochs / 2, seed)
    carrier = case.pruned(carrier, case.share)
    return case.trained(carrier, case.epochs / 2, seed + 1000)


def trained_first_rewound(case: Case, seed: int) -> TorchCarrier:
    """Do the same, the second training beginning with the weights of the float network."""
    _, chosen = removed(case, case.trained(case.start, case.epochs / 2, seed), case.share)
    start, _ = removed(case, case.start, case.share, chosen)
    return case.trained(start, case.epochs / 2, seed + 1000)


def ways(rounds: int) -> dict[str, Way]:
    """Return what is compared."""
    return {
        "at once": at_once,
        f"{rounds} rounds": in_rounds(rounds),
        f"{rounds} rounds, rewound": rewound(rounds),
        "trained first": trained_first,
        "trained first, rewound": trained_first_rewound,
    }


def compare(title: str, case: Case, found: Mapping[str, Sequence[TorchCarrier]]) -> None:
    """Print what each way came to."""
    rows = []
    for name, networks in found.items():
        each = [case.accuracy(network) for network in networks]
        left = [macs(network.graph()) / macs(case.start.graph()) for network in networks]
        span = f"{min(each):.2f}-{max(each):.2f}"
        rows.append([name, f"{np.mean(left):.3f}", f"{np.mean(each):.2f}", span])
    show(title, ["way", "MACs", "mean", "range"], rows)


def digits(folder: Path, share: float, epochs: float) -> Case:
    """Return the network of the digits sample."""
    start = TorchCarrier(digits_net().eval(), bench_prune_untuned.INPUTS)
    start.load(Path("samples/digits/digits.pt"))
    data, samples = bench_prune_untuned.Digits(), bench_prune_untuned.Calibration()
    accuracy = bench_prune_untuned.accuracy
    return Case(start, data, samples, accuracy, 32, share, epochs, folder)


@pytest.mark.parametrize(("share", "epochs"), [(0.05, 6.0), (0.05, 24.0)])
def test_channels_of_the_digits_network(tmp_path: Path, share: float, epochs: float) -> None:
    torch.set_num_threads(1)
    case = digits(tmp_path, share, epochs)
    found = {name: [way(case, seed) for seed in SEEDS] for name, way in ways(3).items()}
    compare(f"digits network at {share:g} of its MACs, {epochs:g} epochs in all", case, found)


@needs("COMPRESSOR_DATA")
def test_channels_of_resnet20(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    test = images("cifar10_test2000.npz")

    def accuracy(carrier: TorchCarrier) -> float:
        return accuracy_of_images(carrier.module, test)

    data, samples = bench_distill.Images(), Calibration()
    case = Case(published(), data, samples, accuracy, 64, 0.5, 2.0, tmp_path)
    found = {name: [way(case, seed) for seed in SEEDS] for name, way in ways(2).items()}
    compare("ResNet-20 at half of its MACs, 2 epochs in all", case, found)


@pytest.mark.parametrize("epochs", [8.0, 24.0])
def test_zeros_of_the_digits_network(tmp_path: Path, epochs: float) -> None:
    torch.set_num_threads(1)
    case = digits(tmp_path, 1.0, epochs)
    schedules: dict[str, dict[str, Any]] = {
        "gradually": {},
        "3 rounds": {"rounds": 3},
        "3 rounds, rewound": {"rounds": 3, "rewind": 0},
    }
    found = {
        name: [
            case.by(
                "finetune",
                case.start,
                seed,
                {"epochs": epochs, "prune": {"target": ZEROS, "scope": "global", **own}},
            )
            for seed in SEEDS
        ]
        for name, own in schedules.items()
    }
    compare(f"digits network, {ZEROS:.0%} of its weights zero, {epochs:g} epochs", case, found)
