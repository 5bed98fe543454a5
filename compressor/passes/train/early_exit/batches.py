"""Which axis of a graph's values runs over the samples of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import onnx_ir as ir

from compressor.errors import SpecError
from compressor.graph.editing import inner_nodes
from compressor.graph.plain import Lengths
from compressor.graph.values import is_op, tensor_spec
from compressor.models.torch.lowering import example_inputs

_FEW, _MORE = 3, 5  # batches that are tried: what differs between the two follows from the batch


class Origin(IntEnum):
    """What a value is computed from; the larger one counts."""

    CONSTANTS = 0
    SHAPES = 1
    DATA = 2


class Batches:
    """What is known of a graph's values when only the number of samples changes.

    Args:
        model: not changed. The first axis of its first input is the batch.

    Raises:
        SpecError: that axis has a fixed length.
    """

    def __init__(self, model: ir.Model):
        specs = [tensor_spec(value) for value in model.graph.inputs]
        batch = specs[0].shape[0] if specs and specs[0].shape else None
        if not isinstance(batch, str):
            raise SpecError(
                "early exits",
                f"need a batch of any size, and the model takes {batch} samples at a time",
                "give the first axis of its inputs a name, such as batch",
            )
        self.symbol = batch
        examples = example_inputs(specs)
        self._tries: list[Lengths] = []
        for count in (_FEW, _MORE):
            lengths = {
                axis: int(length)
                for spec in specs
                for axis, length in zip(spec.shape, examples[spec.name].shape, strict=True)
                if isinstance(axis, str)
            }
            self._tries.append(Lengths(_with_lengths(model, {**lengths, batch: count})))
        self._origins = _origins(model)

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return a value's shape for some batch, if it is known."""
        return self._tries[0].shape(value)

    def origin(self, value: ir.Value) -> Origin:
        """Return what a value is computed from."""
        return self._origins.get(value, Origin.CONSTANTS)

    def axis(self, value: ir.Value) -> int | None:
        """Return the axis that runs over the samples; ``None`` where there is none.

        Raises:
            SpecError: the value's axes are not known, or one mixes samples with something else.
        """
        few, more = (tried.shape(value) for tried in self._tries)
        if few is None or more is None or len(few) != len(more):
            raise _crossing(value, "has axes whose lengths are not known")
        moving = [i for i, pair in enumerate(zip(few, more, strict=True)) if pair[0] != pair[1]]
        if not moving:
            return None
        if len(moving) > 1 or (few[moving[0]], more[moving[0]]) != (_FEW, _MORE):
            raise _crossing(value, f"has samples mixed with other things on axis {moving[0]}")
        return moving[0]

    def fixed(self, value: ir.Value) -> bool:
        """Tell whether a value is known to be as large for any number of samples."""
        few, more = (tried.shape(value) for tried in self._tries)
        return few is not None and few == more

    def same_for_all(self, value: ir.Value) -> bool:
        """Tell whether a value without samples is known not to change with their number."""
        if self.origin(value) is Origin.CONSTANTS:
            return True
        few, more = (tried.constant(value) for tried in self._tries)
        return few is not None and more is not None and np.array_equal(few, more)

    def counts_samples(self, node: ir.Node) -> bool:
        """Tell whether a node gives the number of samples, and nothing else, as ``[1]``."""
        few, more = (tried.constant(node.outputs[0]) for tried in self._tries)
        found = [None if x is None else (x.shape, x.tolist()) for x in (few, more)]
        return is_op(node, "Shape") and found == [((1,), [_FEW]), ((1,), [_MORE])]


def refused(value: ir.Value) -> SpecError:
    """Return the error for a value that depends on all samples together."""
    return _crossing(value, "is computed from all samples together")


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield what a node reads, in subgraphs too."""
    for reader in (node, *inner_nodes(node)):
        yield from (value for value in reader.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().outputs


def _crossing(value: ir.Value, problem: str) -> SpecError:
    return SpecError(
        f"value {value.name!r}",
        f"is read after an exit, and {problem}",
        "put the exit after another layer",
    )


def _with_lengths(model: ir.Model, lengths: dict[str, int]) -> ir.Model:
    """Return a copy with numbers in place of dynamic lengths."""
    copy = model.clone()
    written = {v for node in copy.graph for v in node.outputs}
    for value in (*copy.graph.inputs, *written):
        if value.shape is not None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) else lengths.get(str(d.value), d) for d in value.shape]
            )
    return copy


def _origins(model: ir.Model) -> dict[ir.Value, Origin]:
    found = dict.fromkeys((v for v in model.graph.inputs if not v.is_initializer()), Origin.DATA)
    for node in model.graph:
        origin = max((found.get(v, Origin.CONSTANTS) for v in reads(node)), default=Origin(0))
        if is_op(node, "Shape", "Size"):
            origin = min(origin, Origin.SHAPES)
        found.update(dict.fromkeys(node.outputs, origin))
    return found
