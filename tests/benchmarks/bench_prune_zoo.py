"""Structured pruning of every architecture in the zoo, and how long the planning takes.

Tables, no assertions on time: groups, frozen operators with reasons, multiply-accumulates before
and after, the largest error against the network with zeros in place of the removed channels.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from torch import nn

from compressor.carriers.torch_carrier import TorchCarrier
from compressor.errors import CompressorError
from compressor.graph.channels.analysis import map_channels
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.costs import macs
from compressor.types.channels import ChannelMap
from compressor.types.tensors import TensorSpec
from tests import zoo
from tests.benchmarks.bench_resnet20 import show
from tests.passes.prune.test_zoo import half, run, worst, zeroed
from tests.zoo_networks import deep_residual

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("default"),
]


def reasons(channels: ChannelMap) -> list[str]:
    """Count the frozen operators by what they are and why."""
    found = Counter((f.op_type, f.reason) for f in channels.frozen)
    return [f"{n} {op_type}: {reason}" for (op_type, reason), n in sorted(found.items())]


def test_the_zoo() -> None:
    rows, frozen = [], []
    for one in zoo.ZOO:
        try:
            rows.append(row(one.name))
        except CompressorError as error:
            rows.append([one.name, str(error)[:60], *[""] * 7])
            continue
        channels = map_channels(zoo.carrier(one.name).graph())
        frozen += [[one.name, text] for text in reasons(channels)]
        print("  ".join(rows[-1]), flush=True)
    header = ["architecture", "nodes", "groups", "of them frozen", "mixed", "units"]
    header += ["MACs before", "after", "share", "error", "plan ms"]
    show("Half of the units of every group removed", header, rows)
    show("What is frozen", ["architecture", "operators and reason"], frozen)


def row(name: str) -> list[str]:
    """Prune one architecture; the error is over groups where zeros are the same."""
    model = zoo.carrier(name).graph()
    start = time.perf_counter()
    channels = map_channels(model)
    seconds = time.perf_counter() - start
    batch = zoo.batch(zoo.architecture(name).inputs)
    removed = half(channels)
    smaller, _ = remove_channels(model, channels, removed)
    run(smaller, batch)
    plain = half(channels, mixed=False)
    same, _ = remove_channels(model, channels, plain)
    error = worst(run(same, batch), run(zeroed(model, channels, plain), batch))
    return [
        name,
        f"{sum(1 for _ in model.graph):,}",
        str(len(channels.groups)),
        str(sum(bool(g.frozen) for g in channels.groups)),
        str(sum(bool(g.mixed) for g in channels.groups)),
        f"{int(channels.removable.sum()):,} of {channels.count:,}",
        f"{macs(model):,}",
        f"{macs(smaller):,}",
        f"{macs(smaller) / macs(model):.3f}",
        f"{error:.1e}",
        f"{1000 * seconds:.0f}",
    ]


def test_planning_two_hundred_layers() -> None:
    inputs = (TensorSpec("image", ("batch", 3, 32, 32), "float32"),)
    module = zoo.seeded(deep_residual)
    layers = sum(isinstance(m, nn.Conv2d | nn.Linear) for m in module.modules())
    start = time.perf_counter()
    model = TorchCarrier(module, inputs).graph()
    lowered = time.perf_counter() - start
    times = []
    for _ in range(5):
        start = time.perf_counter()
        channels = map_channels(model)
        times.append(time.perf_counter() - start)
    removed = half(channels)
    start = time.perf_counter()
    remove_channels(model, channels, removed)
    sliced = time.perf_counter() - start
    rows = [
        [
            str(layers),
            f"{sum(1 for _ in model.graph):,}",
            str(len(channels.groups)),
            f"{lowered:.1f}",
            f"{min(times):.3f}",
            f"{np.median(times):.3f}",
            f"{sliced:.3f}",
        ]
    ]
    header = ["layers", "nodes", "groups", "lowering s", "planning s, best", "median", "slicing s"]
    show("Planning a deep network", header, rows)
