"""ResNet-20 in four and eight bits: quantized after training, and trained with it.

Tables, no assertions. The control is the float model, fine-tuned with the same recipe: these JPEG
copies lift any model that is trained on them. Accuracy is that of the ONNX graph in ONNX Runtime;
agreement is the share of predictions that it has in common with the module that was trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compressor.calibration.collect import collect
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.passes.train.engine import train
from compressor.passes.train.finetune import Finetune
from compressor.passes.train.qat.qat import Qat
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import Array, Batch
from compressor.types.training import Training
from samples.cifar.data import normalize
from tests.benchmarks.bench_distill import training
from tests.benchmarks.bench_prune_resnet20 import (
    INPUTS,
    Calibration,
    accuracy,
    batches,
    images,
    logits,
    published,
)
from tests.benchmarks.bench_prune_resnet20 import pytestmark as pytestmark
from tests.benchmarks.bench_resnet20 import show

CONTEXT = PassContext(0, frozenset({"ort-cpu"}), "accuracy")
RECIPE: dict[str, Any] = {"epochs": 3.0, "optimizer": "sgd"}
SMALL, LARGE = 0.003, 0.01
SEEDS = (0, 1, 2)
ENDS = tuple({"match": name, "bits": 8, "activation_bits": 8} for name in ("conv1", "linear"))
ROUNDS = 8
CALIBRATED = 512


class First(Calibration):
    """The first training images as they are."""

    def batches(self) -> Iterator[Batch]:
        """Yield them."""
        held = images("cifar10_train4000.npz")["image"][:CALIBRATED]
        return batches({"image": held, "label": held})


def bits(weights: int, activations: int) -> dict[str, Any]:
    """Return options of ``qat`` and ``quantize-static``."""
    return {"weights": {"bits": weights}, "activations": {"bits": activations}}


def material(folder: Path, carrier: TorchCarrier) -> Training:
    """Return what a run would hand to a pass that trains."""
    given = training(folder / "state", folder / "cache", carrier)
    return replace(given, samples=First())


def statically(carrier: Carrier, options: dict[str, Any]) -> Carrier:
    """Quantize without training."""
    fused = Fuse().apply(carrier, CONTEXT, {}).carrier
    declared = QuantizeStatic.model_validate(options)
    requests = declared.survey(fused, CONTEXT).requests
    taps = dict.fromkeys(t for r in requests for t in r.tensors if t != INPUTS[0].name)
    runner = fused.runner(tuple(taps))
    found = collect(
        lambda batch: {**batch, **runner.run(batch)},
        First().batches(),
        requests,
    )
    return declared.apply(fused, CONTEXT, found).carrier


def predictions(run: Callable[[Array], Array]) -> Array:
    """Return the classes of the test images."""
    data = images("cifar10_test2000.npz")["image"]
    parts = [data[start : start + 250] for start in range(0, len(data), 250)]
    return np.concatenate([run(normalize({"image": p})["image"]).argmax(1) for p in parts])


def of_graph(carrier: Carrier) -> Array:
    """Return the predictions of a graph in ONNX Runtime."""
    runner = carrier.runner()
    return predictions(lambda image: next(iter(runner.run({"image": image}).values())))


@torch.inference_mode()
def of_module(module: nn.Module) -> Array:
    """Return the predictions of a module."""
    module.eval()
    return predictions(lambda x: np.asarray(module(image=torch.from_numpy(x))["output"]))


def right(found: Array) -> float:
    """Return the share of right predictions in percent."""
    return float(100 * np.mean(found == images("cifar10_test2000.npz")["label"]))


def trained(seed: int, folder: Path, **options: Any) -> tuple[Array, Array]:
    """Return the predictions of the graph that ``qat`` writes, and of the module it trained."""
    start, context = published(), replace(CONTEXT, seed=seed)
    declared = Qat.model_validate({**RECIPE, **options})
    given = material(folder, start)
    prepared = declared.prepared(start, context, given)
    course = declared.course(given, INPUTS, seed)
    found = train(declared.job(prepared, start, context, course), course)
    prepared.module.load_state_dict(found.tensors, strict=False)
    graph = of_graph(start.with_graph(prepared.written(found.tensors)[0]))
    return graph, of_module(prepared.module)


def test_three_epochs(tmp_path: Path) -> None:
    start, test = published(), images("cifar10_test2000.npz")
    rows = [["float", "", "", f"{accuracy(start.module, test):.2f}", "", ""]]
    controls: dict[float, float] = {}
    for rate in (SMALL, LARGE):
        found = []
        for seed in SEEDS:
            tuned = Finetune.model_validate({**RECIPE, "learning_rate": rate}).apply_training(
                start, replace(CONTEXT, seed=seed), {}, material(tmp_path / f"{rate}", start)
            )
            assert isinstance(tuned.carrier, TorchCarrier)
            found.append(accuracy(tuned.carrier.module, test))
        controls[rate] = float(np.mean(found))
        rows.append(["float, finetune", f"{rate:g}", "", spread(found), "", ""])
        print("  ".join(rows[-1]), flush=True)
    best = max(controls.values())
    for name, rate, options, seeds in (
        ("W8A8", SMALL, bits(8, 8), SEEDS),
        ("W4A4, first and last layer W8A8", LARGE, {**bits(4, 4), "layers": ENDS}, SEEDS),
        ("W4A4, every layer", LARGE, bits(4, 4), SEEDS),
        ("W4A4, every layer", SMALL, bits(4, 4), SEEDS[:1]),
        ("W4A4, batch-norm: live", LARGE, {**bits(4, 4), "batch_norm": "live"}, SEEDS[:1]),
        ("W4A4, scales: fixed", LARGE, {**bits(4, 4), "scales": "fixed"}, SEEDS[:1]),
        ("W2A8, batch-norm: live", SMALL, {**bits(2, 8), "batch_norm": "live"}, SEEDS[:1]),
    ):
        static = ""
        if options.keys() <= {"weights", "activations", "layers"}:
            static = f"{right(of_graph(statically(start, options))):.2f}"
        found, same = [], []
        for seed in seeds:
            graph, module = trained(seed, tmp_path / name, learning_rate=rate, **options)
            found.append(right(graph))
            same.append(100 * np.mean(graph == module))
        mean = float(np.mean(found))
        to = [f"{mean - control:+.2f}" for control in (controls[rate], best)]
        rows.append([name, f"{rate:g}", static, spread(found), f"{min(same):.2f}", " / ".join(to)])
        print("  ".join(rows[-1]), flush=True)
    show(
        f"ResNet-20, {RECIPE['epochs']:g} epochs on 4,000 images; top-1 % on 2,000 images",
        [
            "network",
            "learning rate",
            "quantize-static",
            "trained",
            "least agreement",
            "to control of this rate / to the better one",
        ],
        rows,
    )


def spread(found: Sequence[float]) -> str:
    """Return the mean, and least and most where there are several."""
    mean = f"{np.mean(found):.2f}"
    return mean if len(found) == 1 else f"{mean} ({min(found):.2f} to {max(found):.2f})"


def stepper(module: nn.Module, given: Training) -> Callable[[], None]:
    """Return a function that makes one step on a batch of its own."""
    optimizer = torch.optim.SGD(module.parameters(), 1e-6, 0.9)
    batch = given.data.batch(np.arange(given.batch), (0,))
    image, label = (torch.from_numpy(batch[name]) for name in ("image", "label"))
    module.train()

    def step() -> None:
        loss = nn.functional.cross_entropy(logits(_Named(module), image), label)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's own has no types
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Named(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.module(image=image)
        return found


def test_time_of_a_step(tmp_path: Path) -> None:
    start = published()
    given = material(tmp_path, start)
    steps = {"finetune": stepper(start.trainable(), given)}
    for name, own in (
        ("qat W8A8", bits(8, 8)),
        ("qat W4A4", bits(4, 4)),
        ("qat W4A4, batch-norm: live", {**bits(4, 4), "batch_norm": "live"}),
        ("qat W4A4, scales: fixed", {**bits(4, 4), "scales": "fixed"}),
    ):
        declared = Qat.model_validate({**RECIPE, **own})
        steps[name] = stepper(declared.prepared(start, CONTEXT, given).module, given)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - begin))
    base = times["finetune"]
    show(
        f"a step of {given.batch} images; least of {ROUNDS}, in turn, "
        f"{torch.get_num_threads()} thread(s)",
        ["step", "ms", "of finetune", "in turn: median"],
        [
            [
                name,
                f"{min(found):.1f}",
                f"{min(found) / min(base):.2f}",
                f"{np.median([a / b for a, b in zip(found, base, strict=True)]):.2f}",
            ]
            for name, found in times.items()
        ],
    )
