"""Residual blocks: branches that are added to what they read, and can go as a whole.

Without its branch, such an addition is its skip. He et al. (2016, arXiv:1603.05027, section 2)
write networks of identity skips as their input plus a sum over blocks, and Veit et al. (2016,
arXiv:1605.06431, section 4.1) find that trained ones still work without one. Where a block changes
the shape of what it reads, its skip is a part or a projection of that (He et al., 2015,
arXiv:1512.03385, sections 3.3 and 4.2), with fewer layers than the branch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common

from compressor.graph.blocks import values_read
from compressor.graph.editing import Editor
from compressor.graph.layers import layers_of
from compressor.graph.lengths import Lengths
from compressor.graph.operators import operator
from compressor.graph.values import value_by_name
from compressor.types.layers import Layer


@dataclass(frozen=True)
class ResidualBlock:
    """A branch and the addition that ends it.

    Attributes:
        name: the first layer of the branch.
        output: name of the value that the addition writes.
        skip: name of the value that the branch is added to: what it reads, or is made of that.
        branch: name of the branch's own result.
        layers: names of the layers that nothing else needs.
        parameters: names of the initializers that nothing else needs.
    """

    name: str
    output: str
    skip: str
    branch: str
    layers: tuple[str, ...]
    parameters: frozenset[str]


def residual_blocks(model: ir.Model) -> tuple[ResidualBlock, ...]:
    """Return the blocks of a graph that can be dropped, in their order, none inside another.

    The skip has the shape of the sum, so that nothing else changes. Of blocks inside each other,
    the inner ones count, and those with what the branch reads as their skip before others.
    """
    shapes = Lengths(model).shapes
    found: list[tuple[ResidualBlock, frozenset[str]]] = []
    for projects in (False, True):
        for node in model.graph:
            if operator(node).arithmetic != "+" or len(node.inputs) != 2:
                continue
            for skip, branch in (node.inputs, node.inputs[::-1]):
                block = None
                if skip is not None and branch is not None:
                    block = _block(node, skip, branch, projects=projects)
                if block is None:
                    continue
                names = (block[0].output, block[0].skip, block[0].branch)
                same = len({shapes.get(name) for name in names} - {None}) == 1
                if same and not any(_nested(block, other) for other in found):
                    found.append(block)
                break
    places = {v.name: i for i, node in enumerate(model.graph) for v in node.outputs}
    return tuple(sorted((block for block, _ in found), key=lambda block: places[block.output]))


def _nested(
    block: tuple[ResidualBlock, frozenset[str]], other: tuple[ResidualBlock, frozenset[str]]
) -> bool:
    """Whether one of two blocks lies inside the other."""
    return block[0].output in other[1] or other[0].output in block[1]


def _block(
    node: ir.Node, skip: ir.Value, branch: ir.Value, *, projects: bool
) -> tuple[ResidualBlock, frozenset[str]] | None:
    """Return the block that an addition ends, and the values that go with it.

    Args:
        projects: the skip is to be made of what the branch reads, not that itself.
    """
    useless = _useless(node, branch)
    read = _read(useless)
    fits = _projected(node, skip, useless) if projects else skip in read
    if skip.is_initializer() or not fits:
        return None
    gone = {*useless}
    parameters = frozenset(
        v.name
        for v in read
        if v.is_initializer() and v.name and all(use.node in gone for use in v.uses())
    )
    names = tuple(dict.fromkeys(x.name for x in _layers(useless) if x.weight in parameters))
    if not names:
        return None
    values = frozenset(v.name or "" for dead in useless for v in dead.outputs)
    block = ResidualBlock(
        names[0],
        node.outputs[0].name or "",
        skip.name or "",
        branch.name or "",
        names,
        parameters,
    )
    return block, values


def _projected(node: ir.Node, skip: ir.Value, branch: Sequence[ir.Node]) -> bool:
    """Whether a skip is made of what the branch reads, with fewer layers than that has."""
    own = _useless(node, skip)
    made = {v for n in (*own, *branch) for v in n.outputs}
    read = {v for v in _read(own) & _read(branch) if not v.is_initializer()}
    flows = any(v.dtype is None or v.dtype.is_floating_point() for v in read - made)
    return flows and len(_layers(own)) < len(_layers(branch))


def _read(nodes: Sequence[ir.Node]) -> set[ir.Value]:
    return {value for node in nodes for value in values_read(node)}


def _layers(nodes: Sequence[ir.Node]) -> list[Layer]:
    return [layer for node in nodes for layer in layers_of(node)]


def _useless(end: ir.Node, branch: ir.Value) -> list[ir.Node]:
    """Return the nodes that nothing needs if one node does not read a value, in their order."""
    useless: dict[ir.Node, None] = {}
    pending = [branch]
    while pending:
        maker = pending.pop().producer()
        if maker is None or maker in useless or maker.graph is not end.graph:
            continue
        outputs = maker.outputs
        readers = {use.node for value in outputs for use in value.uses()}
        needed = readers - useless.keys() - ({end} if branch in outputs else set())
        if needed or any(value.is_graph_output() for value in outputs):
            continue
        if branch in outputs and sum(value is branch for value in end.inputs) > 1:
            continue  # it is added to itself
        useless[maker] = None
        pending.extend(values_read(maker))
    return list(reversed(useless))


def gated(model: ir.Model, blocks: Sequence[ResidualBlock]) -> tuple[ir.Model, tuple[str, ...]]:
    """Return a copy whose branches are multiplied by numbers that it is given: 1, or 0 for none.

    Returns:
        The copy, and the name of the input for each block, a single number of the branch's type.
    """
    copy = model.clone()
    editor, values, gates = Editor(copy), value_by_name(copy), []
    for block in blocks:
        branch, end = values[block.branch], values[block.output].producer()
        assert end is not None
        gate = ir.Value(name=editor.free_name("gate"), shape=ir.Shape(()), type=branch.type)
        product = editor.node("Mul", [branch, gate], f"{block.branch}_gated", branch.dtype)
        end.prepend(product)
        end.replace_input_with(list(end.inputs).index(branch), product.outputs[0])
        copy.graph.inputs.append(gate)
        gates.append(gate.name or "")
    return copy, tuple(gates)


def drop_blocks(model: ir.Model, blocks: Collection[ResidualBlock]) -> ir.Model:
    """Return a copy in which additions are their skips, without what only the branches needed.

    What remains keeps its names. A sum that is an output of the model becomes a copy of its skip.
    """
    if not blocks:
        return model
    copy = model.clone()
    editor, values = Editor(copy), value_by_name(copy)
    kept = dict(values)
    for block in blocks:
        total, skip = kept[block.output], kept[block.skip]
        end = total.producer()
        assert end is not None
        if total.is_graph_output():
            same = editor.node("Identity", [skip], block.output, total.dtype)
            end.prepend(same)
            same.outputs[0].shape = total.shape
            skip = same.outputs[0]
        ir.convenience.replace_all_uses_with(total, skip, replace_graph_outputs=True)
        copy.graph.remove(end, safe=True)
        if skip.is_graph_output():
            skip.name = block.output
        kept[block.output] = skip
    common.RemoveUnusedNodesPass()(copy)
    return copy


def stands_for(name: str, dropped: Collection[ResidualBlock]) -> str:
    """Return the name of the value that a value is once blocks are gone."""
    skips = {block.output: block.skip for block in dropped}
    while name in skips:
        name = skips[name]
    return name
