"""ResNet-20 to half of its multiply-accumulates, beside Torch-Pruning, in one run.

Tables, no assertions: accuracy right after pruning, after batch norms have seen data again, and
after two epochs on 4,000 images; latency of the pruned ONNX models against the float one.

Torch-Pruning 1.6 takes the zero-padding shortcut of this network for an operator that leaves its
channels as they are: the network that it returns does not run. It can be given two things instead,
and gets both: the network with all channels of the residual stream left alone ("inner"), and one
whose shortcuts are 1x1 convolutions with weights of zero and one, which compute the same
("as convolutions"). It takes the least of each that leaves no fewer multiply-accumulates than the
target; since it cannot meet a target exactly, what it leaves is then our target. Ours meets each
with the same channels: "inner" skips what joins the residual stream, "as it is" prunes that, too.
Scope sensitivity and reconstruction, which Torch-Pruning has not, use the first training images
without their labels, at the target itself. A target of latency, which it has not either, is that of
a single image.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from compressor import catalog
from compressor.exporters import OnnxExporter
from compressor.graph.costs import macs, parameters
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.batch_statistics import re_estimated
from compressor.run.timing.timing import already_open, measure
from compressor.types.exporter import ExportContext
from compressor.types.passes import PassContext
from compressor.types.tensors import Batch, TensorSpec, samples_in
from samples.cifar.data import augment, normalize
from samples.cifar.model import resnet20, stage
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.benchmarks.torch_pruning_peer import (
    FixedShortcut,
    peer,
    peer_at,
    with_convolutions,
)

pytestmark = benchmark("COMPRESSOR_DATA", seconds=3600)
INPUTS = (TensorSpec("image", ("batch", 3, 32, 32), "float32"),)
TARGET = 0.5
COARSE_TARGET = 0.65
LATENCY_TARGET = 0.65
BLOCK = 16  # channels that ONNX Runtime's convolutions take at once, with AVX-512
EPOCHS, BATCH, RATE, MOMENTUM = 2, 64, 0.01, 0.9
SEEDS = (0, 1, 2)
CALIBRATED = 512  # images, of which no label is read
THREADS = 1


def images(name: str) -> dict[str, np.ndarray]:
    """Read images and labels of one of the published files."""
    with np.load(Path(os.environ["COMPRESSOR_DATA"]) / name) as file:
        return {"image": file["image"], "label": file["label"]}


def published() -> TorchCarrier:
    """Return the network with its published weights."""
    carrier = TorchCarrier(resnet20(), INPUTS)
    carrier.load(Path(os.environ["COMPRESSOR_DATA"]) / "resnet20_cifar10.th")
    return carrier


def logits(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Run a module; ours may return its only output by name."""
    found = module(batch)
    output: torch.Tensor = next(iter(found.values())) if isinstance(found, dict) else found
    return output


@torch.inference_mode()
def accuracy(module: nn.Module, data: dict[str, np.ndarray]) -> float:
    """Return the share of right answers in percent."""
    module.eval()
    right = 0
    for start in range(0, len(data["label"]), 250):
        part = normalize({k: v[start : start + 250] for k, v in data.items()})
        found = logits(module, torch.from_numpy(part["image"])).argmax(1).numpy()
        right += int((found == part["label"]).sum())
    return 100 * right / len(data["label"])


def batches(data: dict[str, np.ndarray]) -> Iterator[Batch]:
    """Yield the images as they are, a hundred at a time."""
    for start in range(0, len(data["label"]), 100):
        yield normalize({"image": data["image"][start : start + 100]})


def fine_tuned(module: nn.Module, data: dict[str, np.ndarray], seed: int) -> nn.Module:
    """Return a copy trained for two epochs: SGD with momentum, cosine from 0.01 to zero."""
    module = copy.deepcopy(module).requires_grad_(True).train()
    for shortcut in (m for m in module.modules() if isinstance(m, FixedShortcut)):
        shortcut.requires_grad_(False)
    rng = np.random.default_rng(seed)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, RATE, MOMENTUM)
    steps = EPOCHS * -(-len(data["label"]) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        order = rng.permutation(len(data["label"]))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            part = augment({k: v[rows] for k, v in data.items()}, rng)
            found = logits(module, torch.from_numpy(part["image"]))
            loss = nn.functional.cross_entropy(found, torch.from_numpy(part["label"]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's own has no types
            optimizer.step()
            schedule.step()
    return module.eval()


def fails_on_padding(module: nn.Module) -> str:
    """Return what Torch-Pruning's result on the unchanged network says when it is run."""
    try:
        logits(peer(module, 0.3, False, ["linear"]), torch.zeros(1, 3, 32, 32))
    except RuntimeError as error:
        return str(error)
    return "nothing: it runs"


@dataclass(frozen=True)
class Contender:
    """A pruned network and how many seconds the pruning took."""

    name: str
    carrier: TorchCarrier
    seconds: float = 0.0


class Calibration:
    """The first training images as they are, for what is measured and solved while pruning."""

    made_up = False

    def __init__(self) -> None:
        data = images("cifar10_train4000.npz")
        self._data = {name: array[:CALIBRATED] for name, array in data.items()}

    def probe(self, count: int) -> Batch:
        """Return the first images."""
        return normalize({"image": self._data["image"][:count]})

    def batches(self) -> Iterator[Batch]:
        """Yield all of them."""
        return batches(self._data)


def ours(
    carrier: TorchCarrier,
    scope: str,
    share: float,
    skipped: list[str],
    step: int = 1,
    *,
    solved: bool = False,
) -> Contender:
    """Prune to a share of the multiply-accumulates, but not what some layers write."""
    chosen = catalog.load("pass", "prune-structured").model_validate(
        {
            "target": {"macs": share},
            "scope": scope,
            "criterion": "l2",
            "round_to": step,
            "reconstruct": solved,
            "layers": tuple({"match": name, "skip": True} for name in skipped),
        }
    )
    start = time.perf_counter()
    result = chosen.apply(carrier, PassContext(samples=Calibration()), {}).carrier
    assert isinstance(result, TorchCarrier)
    name = f"compressor {scope}, {'inner' if skipped else 'as it is'}"
    name += f", multiples of {step}" if step > 1 else ""
    name += ", reconstructed" if solved else ""
    return Contender(name, result, time.perf_counter() - start)


def fast(carrier: TorchCarrier, share: float) -> Contender:
    """Prune to a share of the latency at batch 1: widths and blocks by measured times."""
    chosen = catalog.load("pass", "prune-structured").model_validate(
        {"target": {"latency": share}, "re_estimate": True}
    )
    start = time.perf_counter()
    outcome = chosen.apply(carrier, PassContext(samples=Calibration()), {})
    assert isinstance(outcome.carrier, TorchCarrier)
    print(next(note for note in outcome.notes if note.startswith("latency at batch")))
    name = f"compressor, latency {share:g}"
    return Contender(name, outcome.carrier, time.perf_counter() - start)


def contenders(carrier: TorchCarrier) -> Iterator[Contender]:
    """Yield the network as it is, then Torch-Pruning's and ours in pairs."""
    module = carrier.module
    yield Contender("unpruned", carrier)
    whole = macs(carrier.graph())
    stream = [n for n, m in module.named_modules() if isinstance(m, nn.Conv2d) and _joins(n)]
    for scope in ("local", "global"):
        for name, start, kept in (
            ("inner", module, stream),
            ("as convolutions", with_convolutions(module), []),
        ):
            everywhere, ignored = scope == "global", ["linear", *kept]
            found, ratio = peer_at(start, round(TARGET * whole), everywhere, ignored)
            begin = time.perf_counter()
            peer(start, ratio, everywhere, ignored)
            seconds = time.perf_counter() - begin
            theirs = TorchCarrier(found.requires_grad_(False), INPUTS)
            yield Contender(f"Torch-Pruning {scope}, {name}", theirs, seconds)
            yield ours(carrier, scope, macs(theirs.graph()) / whole, kept)
    for kept, solved in itertools.product((stream, []), (False, True)):
        yield ours(carrier, "sensitivity", TARGET, kept, solved=solved)
    for scope in ("sensitivity", "global"):  # what of 16 to 64 channels can go by sixteen
        yield ours(carrier, scope, COARSE_TARGET, [], BLOCK)
    yield fast(carrier, LATENCY_TARGET)


def _joins(name: str) -> bool:
    """Return whether a layer of the network writes into the residual stream."""
    return name == "conv1" or name.endswith(".conv2")


def test_half_of_the_work() -> None:
    carrier = published()
    train, test = images("cifar10_train4000.npz"), images("cifar10_test2000.npz")
    print(f"\nTorch-Pruning on the network as it is: {fails_on_padding(carrier.module)}")
    whole = macs(carrier.graph())
    rows = []
    for one in contenders(carrier):
        averaged = re_estimated(one.carrier, batches(train))
        assert isinstance(averaged, TorchCarrier)
        tuned = [accuracy(fine_tuned(one.carrier.module, train, seed), test) for seed in SEEDS]
        rows.append(
            [
                one.name,
                f"{macs(one.carrier.graph()) / whole:.4f}",
                f"{parameters(one.carrier.graph()):,}",
                f"{accuracy(one.carrier.module, test):.2f}",
                f"{accuracy(averaged.module, test):.2f}",
                f"{np.mean(tuned):.2f}",
                f"{min(tuned):.2f}-{max(tuned):.2f}",
                f"{one.seconds:.2f}",
            ]
        )
        print("  ".join(rows[-1]), flush=True)
    show(
        f"ResNet-20 to {TARGET:.0%} of its MACs; top-1 % on 2,000 images; fine-tuned with "
        f"{len(SEEDS)} seeds",
        ["network", "MACs", "weights", "one shot", "statistics", "2 epochs", "range", "seconds"],
        rows,
    )


def test_latency(tmp_path: Path) -> None:
    carrier = published()
    pruned = list(contenders(carrier))
    for count in (1, 64):
        batch = normalize({"image": images("cifar10_test2000.npz")["image"][:count]})
        folder = tmp_path / str(count)
        folder.mkdir()
        show_latency("ResNet-20", carrier, pruned, batch, folder)


def test_latency_of_a_wide_network(tmp_path: Path) -> None:
    """The same network four times as wide, where sixteen channels are a small step."""
    torch.manual_seed(0)
    carrier = TorchCarrier(wide(4), INPUTS)
    batch = normalize({"image": images("cifar10_test2000.npz")["image"][:64]})
    narrower = (ours(carrier, "local", TARGET, [], step) for step in (1, 8, BLOCK))
    show_latency(
        "ResNet-20, 64 to 256 channels",
        carrier,
        itertools.chain([Contender("unpruned", carrier)], narrower),
        batch,
        tmp_path,
    )


def wide(factor: int) -> nn.Module:
    """Return the network with more channels, and random weights."""
    module = resnet20()
    width = 16 * factor
    module.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    module.bn1 = nn.BatchNorm2d(width)
    module.layer1 = stage(width, width)
    module.layer2 = stage(width, 2 * width)
    module.layer3 = stage(2 * width, 4 * width)
    module.linear = nn.Linear(4 * width, 10)
    return module


def show_latency(
    title: str,
    carrier: TorchCarrier,
    pruned: Iterable[Contender],
    batch: Batch,
    folder: Path,
) -> None:
    """Time the ONNX models interleaved, and print the ratios."""
    runners: dict[str, OrtRunner] = {}
    shares: dict[str, float] = {}
    exporter = OnnxExporter(opset=21, target="ort-cpu")
    for one in pruned:
        own = folder / str(len(runners))
        own.mkdir()
        path = exporter.write(one.carrier, own, ExportContext("resnet-20", ""))[0]
        runners[one.name] = OrtRunner(path, one.name, threads=THREADS)
        shares[one.name] = macs(one.carrier.graph()) / macs(carrier.graph())
    times = measure(already_open(runners), [batch], budget=60.0, precision=0.01)
    rows = []
    for name in runners:
        ratio = times.ratio(name, "unpruned")
        low, high = ratio["ci95"]
        rows.append(
            [
                name,
                f"{shares[name]:.3f}",
                f"{times.summary(name)['p50']:.2f}",
                f"{ratio['value']:.3f}",
                f"{low:.3f}-{high:.3f}",
                f"{ratio['value'] / shares[name]:.3f}",
            ]
        )
    show(
        f"{title}: latency of the ONNX models at batch {samples_in(batch)}, {THREADS} thread, "
        "interleaved",
        ["network", "MACs", "ms", "of float", "95 %", "latency / MACs"],
        rows,
    )
