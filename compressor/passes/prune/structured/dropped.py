"""What the layers around a residual block make up for where it is dropped.

Without its branch alone, a block looks dear: a ResNet-20 of CIFAR-10 loses 0.54 of what its outputs
tell by the first, and 0.03 once other layers are solved. So what is traded is what is lost then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import onnx_ir as ir

from compressor.errors import ModelError
from compressor.graph.residuals import ResidualBlock, drop_blocks
from compressor.passes.prune.structured.consumers import Consumer, changeable, changed_layers
from compressor.passes.prune.structured.counterparts import stand_ins
from compressor.passes.prune.structured.moments import AT_ONCE
from compressor.passes.prune.structured.recent import Recent
from compressor.passes.prune.structured.reconstruction import solved_layers
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch


class WithoutBlocks:
    """Parameters of a model without some of its blocks, with the layers around these solved.

    These are the layer before a block, and all behind it up to the next sum. Blocks that follow
    each other are dropped together, others alone, and what changes by them is added up: a
    least-squares solution is linear in what it is to make up for, as long as the inputs are the
    same. Layers that an activation clips are solved once, which is enough to compare. Where
    changes take too much memory, there are none.

    Args:
        blocks: those that may be dropped.
        batches: what layers are solved on.
    """

    def __init__(self, carrier: Carrier, blocks: Sequence[ResidualBlock], batches: Sequence[Batch]):
        self._carrier, self._blocks, self._batches = carrier, blocks, batches
        self._known = Recent()
        self._changed: dict[tuple[int, ...], frozenset[str]] = {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters that may change."""
        names = list[str]()
        for number in range(len(self._blocks)):
            for c in self._around(self._without((number,)), (number,)):
                names += [c.layer.weight, *([c.shift.parameter] if c.shift is not None else [])]
        fits = sum(self._own(name).nbytes for name in names) <= AT_ONCE
        return tuple(dict.fromkeys(names)) if fits else ()

    def changes(self, dropped: frozenset[int]) -> Batch:
        """Return the parameters that change without some blocks, by name."""
        total: Batch = {}
        for row in self._rows(sorted(dropped)) if self.names else ():
            found = self._known.of(row, partial(self._solved, row))
            self._changed[row] = frozenset(found)
            for name, change in found.items():
                own = self._own(name)
                total[name] = (total.get(name, own) + change).astype(own.dtype)
        return total

    def behind(self, name: str, dropped: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        """Return the rows of blocks without which a parameter changes, of what was asked for."""
        return tuple(r for r in self._rows(sorted(dropped)) if name in self._changed.get(r, ()))

    def _rows(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Split blocks into those that follow each other."""
        rows: list[tuple[int, ...]] = []
        for number in numbers:
            follows = rows and number in self._next.get(rows[-1][-1], ())
            rows = [*rows[:-1], (*rows[-1], number)] if follows else [*rows, (number,)]
        return rows

    @cached_property
    def _next(self) -> dict[int, list[int]]:
        """The blocks that begin at the sum, or behind its ReLU, in which each block ends."""
        graph = self._carrier.graph()
        begins = [{*stand_ins(graph, [block])} for block in self._blocks]
        return {
            i: [j for j, names in enumerate(begins) if block.output in names]
            for i, block in enumerate(self._blocks)
        }

    def _without(self, row: Sequence[int]) -> ir.Model:
        return drop_blocks(self._carrier.graph(), [self._blocks[i] for i in row])

    def _solved(self, row: Sequence[int]) -> Batch:
        after = self._without(row)
        graphs, around = (self._carrier.graph(), after), self._around(after, row)
        places = stand_ins(after, [self._blocks[i] for i in row])
        try:
            solved = solved_layers(graphs, around, places, self._batches, once=True)
        except ModelError:  # it is not run block by block, and so nothing will be solved
            return {}
        return {n: t.float().numpy() - self._own(n) for n, t in solved.changes.items()}

    def _around(self, after: ir.Model, row: Sequence[int]) -> list[Consumer]:
        """Return the layers that are solved without a row of blocks, in the order of execution."""
        places = stand_ins(after, [self._blocks[i] for i in row])
        found: list[Consumer] = []
        for c in changed_layers(after, {}, changeable(self._carrier), places):
            found.append(c)
            if c.beside is not None and c.end not in places:
                break
        return found

    def _own(self, name: str) -> Array:
        tensor = self._carrier.graph().graph.initializers[name].const_value
        assert tensor is not None
        return tensor.numpy()
