"""Run a model with rounded activations, and compare its outputs with the float model's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from compressor.graph.editing import Editor, insert_behind
from compressor.graph.output_parts import cut_parts, output_parts
from compressor.graph.values import value_by_name
from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.onnx.ort_session import exact_products
from compressor.passes.quantize.static.placement import ActivationCode
from compressor.types.carrier import Runner
from compressor.types.tensors import Array, Batch, filled, samples_in

Codes: TypeAlias = Mapping[str, ActivationCode]


class Simulation:
    """A model whose activations are rounded by codes that a run is given.

    The runtime does not make integer kernels of it: it takes scales that are inputs for others.

    Args:
        model: not changed.
        codes: the values to round; of each code only the type counts, and whether it has limits.
    """

    def __init__(self, model: ir.Model, codes: Codes):
        graph = model.clone()
        self._editor, self._graph = Editor(graph), graph.graph
        present = value_by_name(graph)
        self._entries = {name: self._round(present[name], code) for name, code in codes.items()}
        self._parts = output_parts(model)
        with exact_products(wanted=True):
            self._runner = graph_runner(graph)

    def run(self, batch: Batch, codes: Codes) -> list[Array]:
        """Return the parts of the outputs, as :meth:`cut` does."""
        feed = dict(batch)
        for value, entries in self._entries.items():
            code = codes[value]
            numbers = (code.scale, code.zero_point, *(code.limits or ()))
            for entry, number in zip(entries, numbers, strict=True):
                assert entry.dtype is not None
                feed[entry.name or ""] = np.asarray(number, entry.dtype.numpy())
        return self.cut(self._runner.run(feed))

    def cut(self, outputs: Batch) -> list[Array]:
        """Return the parts that a run's outputs are joined of; what comes after them is left."""
        return cut_parts(list(outputs.values())[: len(self._parts)], self._parts)

    def _round(self, value: ir.Value, code: ActivationCode) -> list[ir.Value]:
        """Round a value for all of its readers; return the inputs that its code is given by."""
        float32, editor, uses = ir.DataType.FLOAT, self._editor, list(value.uses())
        keys = {"scale": float32, "zero_point": code.dtype}
        if code.limits is not None:
            keys |= {"low": float32, "high": float32}
        entries = [
            ir.Value(
                name=editor.free_name(f"{value.name}.{key}"),
                type=ir.TensorType(dtype),
                shape=ir.Shape(()),
            )
            for key, dtype in keys.items()
        ]
        self._graph.inputs.extend(entries)
        nodes, source = list[ir.Node](), value
        if code.limits is not None:
            nodes.append(editor.node("Clip", [value, *entries[2:]], f"{value.name}.clip", float32))
            source = nodes[-1].outputs[0]
        for op_type, dtype in (("QuantizeLinear", code.dtype), ("DequantizeLinear", float32)):
            operands = [source, *entries[:2]]
            nodes.append(editor.node(op_type, operands, f"{value.name}.{op_type}", dtype))
            source = nodes[-1].outputs[0]
        insert_behind(self._graph, value, nodes)
        for node, index in uses:
            node.replace_input_with(index, source)
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[index] = source
        return entries


def output_errors(
    runner: Runner, simulation: Simulation, codes: Sequence[Codes], batches: Iterable[Batch]
) -> tuple[Array, Array]:
    """Return squared errors ``[codes, samples, outputs]`` and signals ``[samples, outputs]``.

    Parts that an output is joined of count as outputs. Those that are no floats are left out if
    others are.

    Args:
        runner: the float model; it may yield inner values after its outputs.
    """
    signals, errors = list[Array](), list[Array]()
    for batch in batches:
        rows = samples_in(batch)
        wanted = simulation.cut(runner.run(batch))
        floats = [i for i, array in enumerate(wanted) if array.dtype.kind == "f"]
        places: Collection[int] = floats or range(len(wanted))
        signals.append(np.stack([_squares(wanted[i], None, rows) for i in places], 1))
        parts = []
        for given in codes:
            outputs = simulation.run(batch, given)
            parts.append(np.stack([_squares(wanted[i], outputs[i], rows) for i in places], 1))
        errors.append(np.stack(parts))
    return np.concatenate(errors, 1), np.concatenate(signals)


def _squares(wanted: Array, given: Array | None, rows: int) -> Array:
    """Return sums of squares of an array, or of its difference from another, for each sample."""
    values = wanted.astype(np.float64)
    if given is not None:
        values, others = filled(values, given)
        values = values - others
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(values)
    if squares.ndim and len(squares) == rows:
        return np.asarray(squares.reshape(rows, -1).sum(1))
    return np.full(rows, squares.sum() / rows)
