"""Solve the layers that a removal changes, block by block, so that they give what they gave.

Each of them gets the weight with which it comes nearest to what the float model gives there, on
what the pruned layers before it give: J.-H. Luo et al., ThiNet, 2017 (arXiv:1707.06342), section
3.2; Y. He et al., 2017 (arXiv:1707.06168), section 3. At the end of a residual branch the target is
the sum less what the shortcut gives now (section 3.3 there); before a block that was dropped, it is
the sum behind that. Where a ReLU follows, what it cuts off does not count. No labels are used.
Memory holds what enters one block, and the moments of the layers that are solved together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compressor.errors import DataError, ModelError
from compressor.files import scratch
from compressor.graph.blocks import GraphBlock, extract_block, reaching
from compressor.graph.channels.slicing import Kept
from compressor.graph.residuals import ResidualBlock
from compressor.graph.values import value_by_name
from compressor.models.element_types import tensor_of
from compressor.models.onnx.ort_runner import runner_of
from compressor.passes.prune.maths.least_squares import Fit, Start, Sums, solve
from compressor.passes.prune.maths.places import pairs
from compressor.passes.prune.structured.consumers import (
    Consumer,
    changeable,
    changed_layers,
    upstream,
)
from compressor.passes.prune.structured.counterparts import (
    Ends,
    common_blocks,
    named_alike,
    stand_ins,
)
from compressor.passes.prune.structured.moments import places_of
from compressor.passes.prune.structured.solving import Seen, Task
from compressor.run.blocks.blockwise import Activations
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch, samples_in

_ROUNDS = 8  # of solving a layer that an activation clips
HELD = 128 << 20  # bytes of pairs that are kept where layers are solved more than once


@dataclass
class Solved:
    """What has been solved.

    Attributes:
        changes: new values of parameters, in their stored shape and type.
        fits: by layer name.
        samples: how many it was solved on.
        problem: why nothing was.
    """

    changes: dict[str, Tensor] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)
    samples: int = 0
    problem: str = ""

    def details(self) -> dict[str, dict[str, Any]]:
        """Return what was solved for the report, by layer name."""
        return {n: {"reconstruction": [fit.before, fit.after]} for n, fit in self.fits.items()}

    def note(self) -> str:
        """Return what it gains, in a sentence."""
        if self.problem:
            return f"no layer was solved: {self.problem}"
        if not self.fits:
            return "no layer was solved: none that a removal changes can be"
        fits = [fit for fit in self.fits.values() if fit.penalty is not None]
        if not fits:
            return "no layer was solved: nothing was gained by it"
        before, after = (sum(getattr(f, n) for f in fits) / len(fits) for n in ("before", "after"))
        return (
            f"{len(fits)} of {len(self.fits)} layers that a removal changes were solved on "
            f"{self.samples} calibration samples: the squared error of their outputs is "
            f"{100 * after:.1f} % of their variance on average, and was {100 * before:.1f} %"
        )


def reconstructed(
    after: Carrier,
    graphs: tuple[ir.Model, ir.Model],
    kept: Kept,
    dropped: Sequence[ResidualBlock],
    batches: Iterable[Batch],
    *,
    required: bool,
) -> tuple[Carrier, Solved]:
    """Solve layers in the order of execution, each on what those before it give by then.

    Args:
        after: the model without its removed channels.
        graphs: those of the model before pruning, and after it.
        kept: the positions that remain of parameters' axes.
        batches: the calibration data; read once.
        required: it is an error if ONNX Runtime does not run a model, and else no layer is solved.

    Raises:
        DataError: there are no samples, or a value is not finite.
        ModelError: a model is not run, and must be.
    """
    whole, pruned = graphs[0], graphs[1] if dropped else named_alike(graphs[1], graphs[0])
    if pruned is None:
        return after, Solved(problem="the smaller module has other operators than the whole one")
    counterparts = stand_ins(pruned, dropped)
    consumers = changed_layers(pruned, kept, changeable(after), counterparts)
    try:
        solved = solved_layers((whole, pruned), consumers, counterparts, batches)
    except ModelError as error:
        if required:
            raise
        return after, Solved(problem=f"{error.subject} {error.problem}")
    return (after.with_weights(solved.changes) if solved.changes else after), solved


def solved_layers(
    graphs: tuple[ir.Model, ir.Model],
    consumers: Sequence[Consumer],
    counterparts: Mapping[str, str],
    batches: Iterable[Batch],
    *,
    once: bool = False,
) -> Solved:
    """Solve some layers; see :func:`reconstructed`.

    Args:
        consumers: those of the model after pruning, in the order of execution.
        counterparts: see :func:`stand_ins`.
        once: layers that an activation clips are not solved again.
    """
    shapes = [{v.name: v.shape for node in g.graph for v in node.outputs} for g in graphs]
    known = value_by_name(graphs[0])
    same = [
        c
        for c in consumers
        if _same_places(c, *(s.get(c.layer.output) for s in shapes))
        and (c.beside is None or counterparts.get(c.beside, c.beside) in known)
    ]
    if not same:
        return Solved()
    with scratch() as folder:
        rounds = 0 if once else _ROUNDS
        return _Walk(graphs, same, counterparts, folder, rounds).walked(batches)


class _Walk:
    """Visits the blocks of both models in the order of execution."""

    def __init__(
        self,
        models: tuple[ir.Model, ir.Model],
        consumers: Sequence[Consumer],
        counterparts: Mapping[str, str],
        folder: Path,
        rounds: int,
    ):
        self._models, self._consumers, self._counterparts = models, consumers, counterparts
        self._rounds = rounds
        self._upstream = upstream(models[1], consumers)
        self._solved = Solved()
        folders = [folder / name for name in ("inputs", "whole", "pruned")]
        for each in folders:
            each.mkdir()
        self._inputs, *self._entries = map(Activations, folders)

    def walked(self, batches: Iterable[Batch]) -> Solved:
        blocks = common_blocks(*self._models, self._counterparts)
        names = sorted({name for pair in blocks for block in pair for name in block.inputs})
        for batch in batches:
            self._solved.samples += samples_in(batch)
            for name in names:
                self._inputs.append(name, np.asarray(batch[name]))
        if not self._solved.samples:
            raise DataError("calibration data", "has no samples", "give at least one batch")
        for index, pair in enumerate(blocks):
            inside = [c for c in self._consumers if c.layer.weight in pair[1].weights]
            for level in self._levels(inside):
                self._solve(pair, level)
            if not self._unsolved():
                break
            for place, (block, entries) in enumerate(zip(pair, self._entries, strict=True)):
                if block.exit is not None and block.exit not in _given(block):
                    for values in self._run(place, block, [block.exit]):
                        entries.append(block.exit, values[block.exit])
                entries.keep([block.exit] if block.exit else [])
            later = (block for rest in blocks[index + 1 :] for block in rest)
            self._inputs.keep({name for block in later for name in block.inputs})
        return self._solved

    def _unsolved(self) -> bool:
        return any(c.layer.name not in self._solved.fits for c in self._consumers)

    def _levels(self, inside: Sequence[Consumer]) -> list[list[Consumer]]:
        """Split consumers so that no two of a part depend on each other."""
        numbers = {id(consumer): index for index, consumer in enumerate(self._consumers)}
        levels: list[list[Consumer]] = []
        for consumer in inside:
            read = [consumer.input, *([consumer.beside] if self._settled(consumer) else [])]
            needed = frozenset[int]().union(
                *(self._upstream.get(name, ()) for name in read if name)
            )
            if not levels or not needed.isdisjoint(numbers[id(c)] for c in levels[-1]):
                levels.append([])
            levels[-1].append(consumer)
        return levels

    def _settled(self, consumer: Consumer) -> bool:
        """Whether what is added to a consumer's output depends on no later consumer."""
        if consumer.beside is None:
            return False
        place = next(i for i, c in enumerate(self._consumers) if c is consumer)
        return all(index < place for index in self._upstream.get(consumer.beside, ()))

    def _run(self, place: int, block: GraphBlock, names: Sequence[str]) -> Iterator[Batch]:
        """Run a block of one of the models over all samples; yields values by name."""
        # What is added to a layer's output may be computed from inputs that only later blocks read.
        block = reaching(self._models[place], block, names)
        given, wanted = _given(block), list(dict.fromkeys(names))
        outputs = [name for name in wanted if name not in given]
        changes = self._solved.changes if place else {}
        runner = None
        if outputs:
            part = extract_block(self._models[place], block, outputs, changes)
            title = f"after {block.entry!r}" if block.entry else "at the inputs"
            runner = runner_of(part, subject=f"the block {title}")
        parts = [self._inputs.batches(block.inputs)] if block.inputs else []
        if block.entry:
            parts.append(self._entries[place].batches([block.entry]))
        for batches in zip(*parts, strict=True):
            feed = {name: array for batch in batches for name, array in batch.items()}
            yield feed if runner is None else {**feed, **runner.run(feed)}

    def _solve(self, pair: Sequence[GraphBlock], level: Sequence[Consumer]) -> None:
        """Solve some layers; again where an activation behind them clips, until it gains little."""
        tasks = [Task(c, self._ends(c), c.scale(), c.offset(), self._start(c)) for c in level]
        self._gather(pair, tasks)
        for task in tasks:
            _check_finite(task.layer, task.sums)
            task.fit = solve(task.start, task.sums)
        again = [task for task in tasks if task.clips]
        for _ in range(self._rounds):
            if not again:
                break
            for task in again:
                task.sums = [sums.again() for sums in task.sums]
                for seen, number in task.held or ():
                    task.add(seen, number)
            self._gather(pair, [task for task in again if task.held is None])
            again = [task for task in again if task.improved()]
        for task in tasks:
            self._keep(task)

    def _gather(self, pair: Sequence[GraphBlock], tasks: Sequence[Task]) -> None:
        """Run a block of both models over the samples for the moments of some layers."""
        if not tasks:
            return
        left = HELD
        targets = [name for task in tasks for name in (task.layer.layer.output, *task.ends.whole)]
        sources = [name for task in tasks for name in (task.layer.input, *task.ends.beside)]
        runs = zip(self._run(0, pair[0], targets), self._run(1, pair[1], sources), strict=True)
        for number, (exact, given) in enumerate(runs):
            for task in tasks:
                seen = self._seen(task, exact, given)
                left -= task.hold(seen, number, left) if self._rounds else 0
                task.add(seen, number)

    def _ends(self, c: Consumer) -> Ends:
        """Return what a layer makes up for at the sum in which it ends."""
        wanted = self._counterparts.get(c.end)
        plus, minus = ((wanted,), (c.end,)) if wanted else ((), ())
        if c.beside is None:
            return Ends(plus, minus)
        if not self._settled(c):
            return Ends()
        beside = self._counterparts.get(c.beside, c.beside)
        return Ends((beside, *plus), minus, (c.beside,))

    def _seen(self, task: Task, exact: Batch, given: Batch) -> Seen:
        """Return what a layer reads in a batch, and what it is to give there."""
        c, ends = task.layer, task.ends
        outputs = [_chosen(c, exact[name]) for name in (c.layer.output, *ends.whole)]
        outputs += [_tensor(given[name]) for name in ends.beside]
        wanted = places_of(c.layer.columns, self._solved.samples)
        inputs, (target, *others) = pairs(_tensor(given[c.input]), outputs, c.window, wanted)
        beside = torch.zeros(())
        if others:
            factor = task.scale.to(target.dtype)
            beside = others[-1] if ends.beside else beside
            missing = sum(others[: len(ends.plus)]) - sum(others[len(ends.plus) :])
            target = target + torch.where(factor == 0, 0.0, missing / factor)
        values = [inputs, target, beside]
        if self._solved.samples == 1:  # it is judged on other places than those it is solved on
            values = [v.transpose(0, 1) if v.ndim else v for v in values]
        # A part of a larger array would keep all of it.
        return Seen(*(v.contiguous() for v in values))

    def _start(self, c: Consumer) -> Start:
        weight = c.layer.canonical(self._parameter(c.layer.weight)).to(torch.float64)
        value = c.node.inputs[2] if len(c.node.inputs) > 2 else None
        bias = torch.zeros(c.layer.rows, dtype=torch.float64)
        if value is not None:
            bias = self._parameter(value.name or "").to(torch.float64)
        return Start(weight, bias, c.shift is not None, c.scale().square())

    def _keep(self, task: Task) -> None:
        solved, c, fit = self._solved, task.layer, task.fit
        assert fit is not None
        solved.fits[c.layer.name] = fit
        if fit.penalty is None:
            return
        old = self._parameter(c.layer.weight)
        solved.changes[c.layer.weight] = c.layer.stored(fit.weight).to(old.dtype)
        if c.shift is not None:
            held = self._parameter(c.shift.parameter)
            moved = held.to(torch.float64) + c.shift.sign * (fit.bias - task.start.bias)
            solved.changes[c.shift.parameter] = moved.to(held.dtype)

    def _parameter(self, name: str) -> Tensor:
        return tensor_of(self._models[1].graph.initializers[name])


def _same_places(c: Consumer, before: ir.Shape | None, after: ir.Shape | None) -> bool:
    """Whether a layer's output has as many rows as before, of which each can be compared.

    A layer that mixes tokens has a row for each channel of the others, and these may have gone.
    """
    if before is None or after is None or len(before) != len(after):
        return True
    features = 1 if c.layer.is_convolution else len(before) - 1
    pairs_of = zip(before, after, strict=True)
    known = [(a, b) for i, (a, b) in enumerate(pairs_of) if i not in (0, features)]
    return all(a == b for a, b in known if isinstance(a, int) and isinstance(b, int))


def _given(block: GraphBlock) -> list[str]:
    return [*([block.entry] if block.entry else []), *block.inputs]


def _tensor(array: Array) -> Tensor:
    dtype = np.float64 if array.dtype == np.float64 else np.float32
    return torch.from_numpy(np.array(array, dtype))


def _chosen(c: Consumer, array: Array) -> Tensor:
    """Return a value of the whole model at the outputs that remain."""
    axis = 1 if c.layer.is_convolution else array.ndim - 1
    return _tensor(array if c.kept is None else np.take(array, c.kept, axis))


def _check_finite(c: Consumer, folds: Sequence[Sums]) -> None:
    if not all(sums.finite() for sums in folds):
        raise DataError(
            f"input or output of layer {c.layer.name!r}",
            "is not finite on the calibration data",
            "look for NaN and very large values in the data, or set reconstruct: false",
        )
