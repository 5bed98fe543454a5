"""Structured pruning of every architecture in the zoo, and how long the planning takes.

Tables, no assertions on time: groups, frozen operators with reasons, multiply-accumulates before
and after, and the largest errors: against the network with zeros in place of the removed channels,
of what was exported and read back, and of the same pass on the network as an ONNX file.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
from torch import nn

from compressor.graph.channels.analysis import map_channels
from compressor.graph.channels.slicing import remove_channels
from compressor.graph.costs import macs
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.channels import ChannelMap
from compressor.types.tensors import TensorSpec
from tests import small_zoo as zoo
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.marks import benchmark
from tests.zoo_networks import deep_residual
from tests.zoo_pruning import chain, half

pytestmark = benchmark(seconds=3600)


def reasons(channels: ChannelMap) -> list[str]:
    """Count the frozen operators by what they are and why."""
    found = Counter((f.op_type, f.reason) for f in channels.frozen)
    return [
        f"{n} {op_type}: {reason}" if op_type else reason
        for (op_type, reason), n in sorted(found.items())
    ]


def test_the_zoo(tmp_path: Path) -> None:
    rows, frozen = [], []
    for name in zoo.NAMES:
        row, channels = pruned_row(name, tmp_path / name)
        rows.append(row)
        frozen += [[name, text] for text in reasons(channels)]
        print("  ".join(row), flush=True)
    header = ["architecture", "nodes", "groups", "frozen", "MACs before", "after", "target"]
    header += ["share", "proof", "unproved", "reload", "ONNX-in", "differ", "runs as", "plan ms"]
    show("Pruned to half of the multiply-accumulates, largest errors", header, rows)
    show("What is frozen", ["architecture", "operators and reason"], frozen)


def pruned_row(name: str, folder: Path) -> tuple[list[str], ChannelMap]:
    """Take one architecture through the chain.

    Errors are relative to the largest output: masked against sliced (and the number of groups that
    lost units and cannot be compared so), whatever was read back, and pruned as a file against
    pruned as a module; then how many tensors these two do not share.
    """
    model = zoo.carrier(name).graph()
    start = time.perf_counter()
    channels = map_channels(model)
    seconds = time.perf_counter() - start
    found = chain(name, folder)
    small = found.module.carrier
    executes = isinstance(small, TorchCarrier) and small.executes_graph
    row = [
        name,
        f"{sum(1 for _ in model.graph):,}",
        str(len(channels.groups)),
        str(sum(bool(g.frozen) for g in channels.groups)),
        f"{macs(model):,}",
        f"{macs(small.graph()):,}",
        f"{found.module.target:g}",
        f"{found.module.share:.3f}",
        "-" if found.module.proof is None else f"{found.module.proof:.1e}",
        str(found.module.unproved),
        f"{max(found.reloads.values()):.1e}",
        f"{found.difference:.1e}",
        str(len(found.moved)),
        "its graph" if executes else "itself" if isinstance(small, TorchCarrier) else "ONNX",
        f"{1000 * seconds:.0f}",
    ]
    return row, channels


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
