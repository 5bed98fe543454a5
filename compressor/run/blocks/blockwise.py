"""Calibrate a model block by block, so that memory holds the activations of one block.

Every block is run twice over the calibration data: once for the statistics that a pass asked for,
and once more, with the weights that the pass has put in their place, for what enters the next
block. So each block is fitted to the inputs that it will have, which E. Frantar et al., GPTQ,
2022 (arXiv:2210.17323), section 4, do as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from compressor.calibration.collect import collect
from compressor.errors import DataError
from compressor.files import staging
from compressor.graph.blocks import GraphBlock, extract_block, partition
from compressor.graph.layers import graph_layers
from compressor.models.element_types import tensor_of
from compressor.models.onnx.ort_runner import runner_of
from compressor.progress import Advance, nobody_watches
from compressor.run.store import store_of
from compressor.run.weight_pass import BlockInMemory
from compressor.run.workspace import Workspace
from compressor.types.carrier import Carrier, Runner
from compressor.types.data import ALONE, Ranks, share
from compressor.types.layers import WeightCodes
from compressor.types.statistics import Request
from compressor.types.tensors import Array, Batch, samples_in
from compressor.types.tensors import Feed as WholeFeed

_IN_MEMORY = 512 << 20  # bytes of activations between blocks; more than that lies in files


@contextmanager
def block_run(
    workspace: Workspace, label: str, carrier: Carrier, requests: Sequence[Request]
) -> Iterator[GraphBlocks]:
    """Yield the blocks of a model for a pass, with the run's calibration data.

    Args:
        carrier: the model; it has a graph.
    """
    data = workspace.plan.data["calibration"]
    graph = carrier.graph()
    blocks = partition(graph)
    total = None if data.runs is None else len(blocks) * data.runs
    with (
        staging(store_of(workspace.plan.spec.output)) as folder,
        workspace.progress.stage(f"{label}: block by block", total) as advance,
    ):
        batches = data.unrolled(carrier, share(data.batches(), workspace.ranks))
        feed = Feed(batches, folder, advance, workspace.ranks)
        yield GraphBlocks(graph, blocks, requests, feed)


@dataclass(frozen=True)
class Feed:
    """What blocks are calibrated with.

    Attributes:
        batches: the calibration data, or this process's share of it; read once.
        folder: an empty one on a disk with room for the activations between two blocks.
        advance: called with how many samples have been run through a block, of as many as there
            are samples for each block.
    """

    batches: Iterable[Batch]
    folder: Path
    advance: Advance = nobody_watches
    ranks: Ranks = ALONE


class Activations:
    """Values of all calibration batches that the next block reads: in memory, or in files.

    Args:
        directory: an empty folder for what does not fit into memory.
        limit: bytes that are held in memory.
    """

    def __init__(self, directory: Path, limit: int = _IN_MEMORY):
        self._directory = directory
        self._limit = limit
        self._held = 0
        self._arrays: dict[str, list[Array]] = {}
        self._files = 0

    def append(self, name: str, array: Array) -> None:
        """Add a value of the next batch."""
        arrays = self._arrays.setdefault(name, [])
        if self._held + array.nbytes <= self._limit:
            self._held += array.nbytes
            arrays.append(array)
            return
        path = self._directory / f"{self._files}.npy"
        self._files += 1
        np.save(path, array)
        arrays.append(np.load(path, mmap_mode="r"))

    def keep(self, names: Iterable[str]) -> None:
        """Forget every value but these."""
        for name in self._arrays.keys() - set(names):
            for array in self._arrays.pop(name):
                if isinstance(array, np.memmap):
                    Path(str(array.filename)).unlink()
                else:
                    self._held -= array.nbytes

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """Yield the batches with these values."""
        columns = [self._arrays.get(name, []) for name in names]
        for arrays in zip(*columns, strict=True):
            yield dict(zip(names, arrays, strict=True))


class GraphBlocks:
    """The blocks of an ONNX IR graph, run in ONNX Runtime.

    Args:
        graph: the model; not changed.
        blocks: its parts, as :func:`compressor.graph.blocks.partition` finds them.
    """

    def __init__(
        self,
        graph: ir.Model,
        blocks: Sequence[GraphBlock],
        requests: Sequence[Request],
        feed: Feed,
    ):
        self._graph = graph
        self._blocks = tuple(blocks)
        self._requests = tuple(requests)
        self._feed = feed
        self._store = Activations(feed.folder)
        self._samples: list[int] = []  # of each batch
        self._whole = False  # each batch is a whole feed
        self._layers = {layer.weight: layer for layer in graph_layers(graph)}
        self._changes: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockInMemory]:
        """Yield one block at a time, in the order of execution."""
        self._read_inputs()
        for index, block in enumerate(self._blocks):
            statistics = self._statistics(block, index)
            yield BlockInMemory(block.weights, statistics, self._put)
            rest = self._blocks[index + 1 :]
            wanted = any(self._asked(later) for later in rest)
            if block.exit is not None and wanted:
                self._run_on(block, block.exit)
            needed = {name for later in rest for name in later.inputs}
            self._store.keep({*needed, *([block.exit] if block.exit else [])})
            self._forget_weights(rest)

    def _read_inputs(self) -> None:
        names = list(dict.fromkeys(name for block in self._blocks for name in block.inputs))
        for batch in self._feed.batches:
            self._samples.append(samples_in(batch))
            self._whole = isinstance(batch, WholeFeed)
            for name in names:
                self._store.append(name, batch[name])
        if not sum(self._feed.ranks.gathered(len(self._samples))):
            raise DataError("calibration data", "has no samples", "give at least one batch")

    def _statistics(self, block: GraphBlock, index: int) -> dict[str, Any]:
        """Run a block over the data and return the statistics that lie in it.

        Each process observes its own batches; ``collect`` merges the states of all.
        """
        requests = self._asked(block)
        if not requests:
            self._feed.advance((index + 1) * sum(self._samples))
            return {}
        given = _inputs(block)
        taps = list(dict.fromkeys(t for r in requests for t in r.tensors if t not in given))
        runner = self._runner(block, taps) if taps else None
        collected: dict[str, Any] = collect(
            lambda batch: batch if runner is None else {**batch, **runner.run(batch)},
            self._counted(index, given),
            requests,
            None,
            self._feed.ranks,
        )
        self._feed.advance((index + 1) * sum(self._samples))
        return collected

    def _asked(self, block: GraphBlock) -> list[Request]:
        return [r for r in self._requests if block.reads.issuperset(r.tensors)]

    def _counted(self, index: int, names: Sequence[str]) -> Iterator[Batch]:
        done = index * sum(self._samples)
        for batch, samples in zip(self._store.batches(names), self._samples, strict=True):
            yield WholeFeed(batch) if self._whole else batch
            done += samples
            self._feed.advance(done)

    def _run_on(self, block: GraphBlock, exit: str) -> None:
        """Run a block, as its weights are now, for what the next block starts from."""
        given = _inputs(block)
        if exit in given:
            return
        runner = self._runner(block, [exit])
        for batch in self._store.batches(given):
            self._store.append(exit, runner.run(batch)[exit])

    def _runner(self, block: GraphBlock, outputs: Sequence[str]) -> Runner:
        model = extract_block(self._graph, block, outputs, self._changes)
        place = f"after {block.entry!r}" if block.entry else "at the inputs"
        return runner_of(model, subject=f"the block {place}")

    def _put(self, changes: Mapping[str, WeightCodes | torch.Tensor]) -> None:
        for name, change in changes.items():
            if isinstance(change, WeightCodes):
                change = self._dequantized(name, change)
            self._changes[name] = change

    def _dequantized(self, name: str, codes: WeightCodes) -> torch.Tensor:
        layer = self._layers[name]
        weight = self._changes.get(name)
        if weight is None:
            weight = tensor_of(self._graph.graph.initializers[name])
        quantized = codes.compute(layer.canonical(weight))
        return layer.stored(quantized.dequantize()).to(weight.dtype)

    def _forget_weights(self, rest: Sequence[GraphBlock]) -> None:
        needed = {name for block in rest for name in block.weights}
        for name in self._changes.keys() - needed:
            del self._changes[name]


def _inputs(block: GraphBlock) -> list[str]:
    return [*([block.entry] if block.entry else []), *block.inputs]
