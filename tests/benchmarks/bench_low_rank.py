"""Layers of the published ResNet-20 as products of two, by their weights and by what they see.

A table: accuracy as the network comes out of the pass, with batch-norm statistics estimated anew,
and without batch-norm (folded into the layers before the pass), and the error of the logits.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from compressor import catalog
from compressor.graph.blocks import partition
from compressor.graph.costs import macs, parameters
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.batch_statistics import re_estimated
from compressor.run.blocks.blockwise import Feed, GraphBlocks
from compressor.run.noise.signals import ratio_db
from compressor.types.carrier import Carrier
from compressor.types.passes import Pass, PassContext
from compressor.types.tensors import Array
from samples.cifar.data import normalize
from tests.benchmarks.bench_prune_resnet20 import batches, images, published
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark

pytestmark = benchmark("COMPRESSOR_DATA")
TARGETS = (0.7, 0.5)
CALIBRATION = 512  # images


def declared(name: str, **options: object) -> Pass:
    """Return a pass; option names as in Python."""
    found: Pass = catalog.load("pass", name).model_validate(options)
    return found


def factored(carrier: Carrier, target: float, weighted: bool, folder: Path) -> Carrier:
    """Apply the pass as a run does."""
    step = declared("low-rank", target={"macs": target}, weighted=weighted)
    context = PassContext()
    survey = step.survey(carrier, context)
    if not step.by_block:
        return step.apply(carrier, context, {}).carrier
    data = images("cifar10_train4000.npz")
    some = batches({name: array[:CALIBRATION] for name, array in data.items()})
    folder.mkdir()
    feed = Feed(some, folder)
    blocks = GraphBlocks(carrier.graph(), partition(carrier.graph()), survey.requests, feed)
    return step.apply(carrier, replace(context, blocks=blocks), {}).carrier


def logits(carrier: Carrier, data: dict[str, Array]) -> Array:
    """Run a model on all images."""
    runner = carrier.runner()
    return np.concatenate(
        [
            next(iter(runner.run(normalize({"image": data["image"][i : i + 250]})).values()))
            for i in range(0, len(data["label"]), 250)
        ]
    )


def test_resnet20(tmp_path: Path) -> None:
    carrier = published()
    train, test = images("cifar10_train4000.npz"), images("cifar10_test2000.npz")
    folded = declared("fuse").apply(carrier, PassContext(), {}).carrier
    wanted = logits(carrier, test)
    whole = macs(carrier.graph())

    def accuracy(found: Array) -> str:
        return f"{100 * float((found.argmax(1) == test['label']).mean()):.2f}"

    def error(found: Array) -> str:
        difference = float(np.square(found - wanted).sum())
        decibels = ratio_db(float(np.square(wanted).sum()), difference)
        return "-" if decibels is None else f"{decibels:.2f}"

    first = ["as it is", "1.0000", f"{parameters(carrier.graph()):,}", accuracy(wanted)]
    rows = [[*first, *["-"] * 5]]
    for target in TARGETS:
        for weighted in (False, True):
            place = tmp_path / f"{target}{weighted}"
            start = time.perf_counter()
            after = factored(carrier, target, weighted, place)
            seconds = time.perf_counter() - start
            assert isinstance(after, TorchCarrier)
            plain = logits(after, test)
            averaged = logits(re_estimated(after, batches(train)), test)
            alone = logits(factored(folded, target, weighted, place / "folded"), test)
            rows.append(
                [
                    f"{target:g}, {'weighted' if weighted else 'plain'}",
                    f"{macs(after.graph()) / whole:.4f}",
                    f"{parameters(after.graph()):,}",
                    accuracy(plain),
                    error(plain),
                    accuracy(averaged),
                    accuracy(alone),
                    error(alone),
                    f"{seconds:.2f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
    show(
        f"ResNet-20 to a share of its MACs by low-rank; top-1 % on 2,000 images, error of the "
        f"logits in dB; {CALIBRATION} images for weighted",
        ["target", "MACs", "weights", "top-1", "dB", "statistics", "folded", "dB", "seconds"],
        rows,
    )
