"""Which values of a pruned model are compared with which of the whole, and where both are cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from compressor.graph.blocks import GraphBlock, partition
from compressor.graph.operators import operator
from compressor.graph.residuals import ResidualBlock, stands_for
from compressor.graph.values import main_values, sole_reader


class Ends(NamedTuple):
    """Values at the sum in which a layer ends.

    Attributes:
        plus: those of the whole model that make up, with its output, what is to be reached.
        minus: that of the whole model which the output is already a part of.
        beside: what is added in the pruned model.
    """

    plus: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[str, ...]:
        """All of the whole model."""
        return (*self.plus, *self.minus)


def stand_ins(pruned: ir.Model, dropped: Sequence[ResidualBlock]) -> dict[str, str]:
    """Return the values that stand for what dropped blocks gave, and the names of that.

    What a ReLU makes one of them of does so, too: what is negative is cut off behind either sum.

    Args:
        dropped: in the order of execution.
    """
    found: dict[str, str] = {}
    values = main_values(pruned)
    for block in dropped:
        value = values.get(stands_for(block.skip, dropped))
        while value is not None:
            found[value.name or ""] = block.output
            maker = value.producer()
            value = None
            if maker is not None and operator(maker).rectifies and maker.inputs[0] is not None:
                alone = sole_reader(maker.inputs[0]) is maker
                value = maker.inputs[0] if alone else None
    return found


def named_alike(pruned: ir.Model, whole: ir.Model) -> ir.Model | None:
    """Return the pruned model with the names of the whole one's values; ``None`` if it has others.

    A module that was adapted to fewer channels may have been lowered again. The exporter numbers
    values as it meets them, and how many constants are among these depends on the channels.
    """
    names, own = (
        [(n.op_type, *(v.name for v in n.outputs)) for n in m.graph] for m in (whole, pruned)
    )
    kinds = {name: kind for kind, *several in names for name in several}
    kinds |= dict.fromkeys(whole.graph.initializers, "")
    if [kind for kind, *_ in own] != [kind for kind, *_ in names]:
        alike = all(kinds.get(name, kind) == kind for kind, *several in own for name in several)
        return pruned if alike else None
    if own == names:
        return pruned
    renamed = pruned.clone()
    outputs = [value for node in renamed.graph for value in node.outputs]
    wanted = [name for _, *several in names for name in several]
    for number, value in enumerate(outputs):
        value.name = f"renamed.{number}"
    for name in {*renamed.graph.initializers} & {*wanted}:
        renamed.graph.initializers[name].name = f"constant.{name}"
    for value, wanted_name in zip(outputs, wanted, strict=True):
        value.name = wanted_name
    return renamed


def common_blocks(
    whole: ir.Model, pruned: ir.Model, counterparts: Collection[str]
) -> list[tuple[GraphBlock, GraphBlock]]:
    """Cut both models at the same values, except at those that stand for others."""
    blocks = [partition(model, past_sizes=True) for model in (whole, pruned)]
    exits = {block.exit for block in blocks[0]} & {block.exit for block in blocks[1]}
    exits -= {*counterparts}
    return list(zip(*(_joined(part, exits) for part in blocks), strict=True))


def _joined(blocks: Sequence[GraphBlock], exits: Collection[str | None]) -> list[GraphBlock]:
    """Join blocks that do not end at one of some values with those that follow."""
    joined: list[GraphBlock] = []
    waiting: list[GraphBlock] = []
    for block in blocks:
        waiting.append(block)
        if block.exit in exits:
            joined.append(
                replace(
                    waiting[0],
                    exit=block.exit,
                    inputs=tuple(dict.fromkeys(n for b in waiting for n in b.inputs)),
                    weights=tuple(dict.fromkeys(n for b in waiting for n in b.weights)),
                    reads=frozenset[str]().union(*(b.reads for b in waiting)),
                )
            )
            waiting = []
    return joined
