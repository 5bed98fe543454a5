"""Early exits of ResNet-20: who leaves where, what that costs in accuracy, and what it saves.

A table, no assertions. Heads after layer1 and layer2 are trained once, for three epochs on the
4,000 training images. Thresholds are chosen for several wanted agreements on half of the 2,000 test
images, since the network is surer of the images that it was trained on; shares, agreement and
accuracy are those of the other half. Latency is the mean over 256 of these at batch 1, of each
image's best of five, of the exported files in ONNX Runtime with one thread; full network and early
exits take turns image by image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compressor.exporters import OnnxExporter
from compressor.graph.costs import macs
from compressor.models.onnx.ort_session import OrtRunner
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.train.early_exit.early_exit import EarlyExit
from compressor.passes.train.early_exit.heads import confidence_name, with_confidences, with_heads
from compressor.passes.train.early_exit.points import Batches, find_answer, find_points
from compressor.run.timing.timing import already_open, measure
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext
from compressor.types.passes import Outcome, PassContext
from compressor.types.tensors import Batch
from compressor.types.training import Rows
from samples.cifar.data import augment, normalize
from tests.benchmarks.bench_prune_resnet20 import images, published
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.compressor.passes.train.small_training import training

pytestmark = benchmark("COMPRESSOR_DATA", seconds=3600)
EXITS = ({"after": "layer1"}, {"after": "layer2"})
AGREEMENTS = (99.5, 99.0, 98.0, 95.0)
CALIBRATION, TIMED, EPOCHS, BATCH = 1000, 256, 3, 64


@dataclass(frozen=True)
class Images:
    """Training images, flipped and cropped at random."""

    arrays: dict[str, np.ndarray]
    target: str | None = "label"
    random: bool = True
    digest: str = "cifar"

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.arrays["label"])

    def batch(self, rows: Rows, seed: Any) -> Batch:
        """Return images in the order of ``rows``."""
        part = {name: array[rows] for name, array in self.arrays.items()}
        return augment(part, np.random.default_rng(tuple(seed)))


@dataclass(frozen=True)
class Calibration:
    """Images that neither network nor heads were trained on."""

    image: np.ndarray
    made_up: bool = False

    def probe(self, count: int) -> Batch:
        """Return the first ones."""
        return normalize({"image": self.image[:count]})

    def batches(self) -> Iterator[Batch]:
        """Yield all of them."""
        for start in range(0, len(self.image), 64):
            yield normalize({"image": self.image[start : start + 64]})


def outcome(folder: Path, carrier: Carrier, agreement: float) -> Outcome:
    """Apply the pass; heads that were trained before are trained for one step more only."""
    own = Images(images("cifar10_train4000.npz"))
    known = images("cifar10_test2000.npz")["image"][:CALIBRATION]
    steps = EPOCHS * -(-own.samples // BATCH)
    given = training(folder, carrier, data=own)  # type: ignore[arg-type]  # any carrier will do
    given = replace(given, batch=BATCH, samples=Calibration(known))
    options = {"steps": steps, "learning_rate": 0.01, "save_every": steps - 1}
    chosen = EarlyExit.model_validate({"exits": EXITS, "agreement": agreement, **options})
    return chosen.apply_training(carrier, PassContext(metric="accuracy"), {}, given)


def decided(before: Carrier, after: Carrier, batch: Batch) -> list[np.ndarray]:
    """Return which samples leave at each exit of a model, found with all heads at once."""
    graph, held = before.graph(), after.graph().graph.initializers
    exits = EarlyExit.model_validate({"exits": EXITS}).exits
    batches = Batches(graph)
    answer = find_answer(graph, batches)
    points = [
        p for p in find_points(graph, exits, batches, answer) if f"exit{p.number}.threshold" in held
    ]

    def tensor(name: str) -> np.ndarray:
        value = held[name].const_value
        assert value is not None
        return value.numpy()

    own = [{n: tensor(f"exit{p.number}.{n}") for n in ("weight", "bias")} for p in points]
    flat, _ = with_confidences(with_heads(graph, points, answer, own), "probability", answer)
    found = before.with_graph(flat).runner().run(batch)
    here, left = np.ones(len(batch["image"]), bool), []
    for index, point in enumerate(points, start=1):
        sure = found[confidence_name(index)] >= tensor(f"exit{point.number}.threshold")
        left.append(here & sure)
        here &= ~sure
    return left


def test_early_exits_of_resnet20(tmp_path: Path) -> None:
    carrier = Fuse().apply(published(), PassContext(), {}).carrier
    every = images("cifar10_test2000.npz")
    test = {name: array[CALIBRATION:] for name, array in every.items()}
    batch = normalize({"image": test["image"]})
    full = exported(carrier, tmp_path / "full")
    answers = full.run(batch)["output"].argmax(1)
    whole = macs(carrier.graph())
    rows = [["-", percent(answers == test["label"]), "100.00", "-", "-", "100.0", "-", "1.00"]]
    for agreement in AGREEMENTS:
        result = outcome(tmp_path / "heads", carrier, agreement)
        for note in result.notes:
            print(f"  {note}")
        early = exported(result.carrier, tmp_path / str(agreement))
        found = early.run(batch)["output"].argmax(1)
        left = decided(carrier, result.carrier, batch)
        names = [row.name for row in result.layers]
        shares = {name: float(100 * flags.mean()) for name, flags in zip(names, left, strict=True)}
        alone = [{"image": image[None]} for image in batch["image"][:TIMED]]
        times = measure(already_open({"early": early, "full": full}), alone, 60)
        fast, slow = (times.summary(name)["mean"] for name in ("early", "full"))
        all_the_way = 100 - sum(shares.values())
        rows.append(
            [
                f"{agreement:g}",
                percent(found == test["label"]),
                percent(found == answers),
                f"{shares.get('exit1', 0):.1f}",
                f"{shares.get('exit2', 0):.1f}",
                f"{all_the_way:.1f}",
                f"{fast:.3f} / {slow:.3f} ms",
                f"{fast / slow:.2f}",
            ]
        )
    heads = [
        *("agreement wanted", "accuracy", "agreement", "exit 1 %", "exit 2 %", "to the end %"),
        *("mean latency", "ratio"),
    ]
    show(f"early exits of ResNet-20, {whole / 1e6:.1f} million MACs", heads, rows)


def exported(carrier: Carrier, folder: Path) -> OrtRunner:
    """Write a model as ONNX, and open it with one thread."""
    folder.mkdir()
    exporter = OnnxExporter()
    files = exporter.write(carrier, folder, ExportContext(name="bench", spec_digest="0" * 64))
    return OrtRunner(files[0], "benchmark", threads=1)


def percent(flags: np.ndarray) -> str:
    """Return a share in percent."""
    return f"{100 * flags.mean():.2f}"
