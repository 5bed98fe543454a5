"""From an ONNX graph to a program: operators resolved, slots numbered, lifetimes known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass

from compressor.errors import ModelError
from compressor.models.element_types import TORCH_DTYPES, from_numpy
from compressor.models.executor.node import Node, Operators, describe
from compressor.models.executor.ops import OPERATORS
from compressor.models.executor.ops.quantization import rounded_at_once
from compressor.models.executor.program import ABSENT, Body, Program, Step

OLDEST_OPSET = 13
"""Axes and sizes have been inputs since this opset; what is opened is upgraded anyway."""

NEWEST_OPSET = 28
"""The newest opset whose operators have been compared with ONNX's own test cases."""


def unknown_operators(operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names of operators that cannot be run, of ``(domain, name)`` pairs."""
    names = []
    for domain, name in operators:
        key = _domain(domain), name
        if key not in OPERATORS and key != ("", "Constant"):
            names.append(f"{domain}.{name}" if key[0] else name)
    return tuple(dict.fromkeys(names))


def flattened(model: ir.Model) -> ir.Model:
    """Return the model without functions: a copy, or the model itself if it has none.

    Raises:
        ModelError: its functions cannot be inlined.
    """
    if not model.functions:
        return model
    try:
        copy = model.clone()
        InlinePass()(copy)
    except (ValueError, RuntimeError, ir.passes.PassError) as error:
        raise ModelError(
            "the ONNX graph",
            f"its functions cannot be inlined: {error}",
            "export the model without functions",
        ) from error
    return copy


class Compiler:
    """Compiles the graphs of one model.

    Args:
        opsets: the model's opset versions by domain.
        operators: further operators, by domain and name, beside the executor's own.
        joins: a value that is quantized and dequantized at once is computed without its codes.

    Attributes:
        constants: the values of ``Constant`` nodes met so far, which become part of the module.

    Raises:
        ModelError: the opset is not supported.
    """

    def __init__(self, opsets: Mapping[str, int], operators: Operators, *, joins: bool = True):
        self.constants: dict[ir.Value, torch.Tensor] = {}
        self._operators = {**OPERATORS, **operators}
        self._joins = joins
        self._opsets = {_domain(name): version for name, version in opsets.items()}
        version = self._opsets.get("", NEWEST_OPSET)
        if not OLDEST_OPSET <= version <= NEWEST_OPSET:
            raise ModelError(
                "the ONNX graph",
                f"opset {version} is outside {OLDEST_OPSET} to {NEWEST_OPSET}",
                "convert the model with onnx.version_converter",
            )

    def compile(self, graph: ir.Graph) -> tuple[Program, tuple[ir.Value, ...]]:
        """Return the program of a graph, and the values that it captures from outside.

        Initializers and constants are captured too, by whatever graph they belong to, and
        whatever else no node gives.

        Raises:
            ModelError: an operator, attribute or type is not supported.
        """
        slots: dict[ir.Value | None, int] = {None: ABSENT}
        inputs = [value for value in graph.inputs if not value.is_initializer()]
        for value in inputs:
            _check_input(value)
            slots[value] = len(slots)
        steps: list[Step] = []
        given: set[ir.Value | None] = {None, *inputs}
        for node in graph:
            if node.op_type == "Constant" and not _domain(node.domain):
                self.constants[node.outputs[0]] = _constant(node, self._opset(node))
            else:
                steps.append(self._step(node, slots))
                given.update(node.outputs)
        outputs = tuple(_slot(slots, value) for value in graph.outputs)
        captured = tuple(v for v in slots if v is not None and v not in given)
        taken = tuple(slots[value] for value in (*inputs, *captured))
        steps = _ordered(steps, graph)
        if self._joins:
            steps = rounded_at_once(steps, outputs)
        return Program(len(slots), taken, outputs, tuple(steps)).with_lifetimes(), captured

    def _opset(self, node: ir.Node) -> int:
        domain = _domain(node.domain)
        return node.version or self._opsets.get(domain) or (1 if domain else NEWEST_OPSET)

    def _step(self, node: ir.Node, slots: dict[ir.Value | None, int]) -> Step:
        captured: list[ir.Value] = []

        def prepare(graph: ir.Graph) -> Body:
            program, values = self.compile(graph)
            captured.extend(value for value in values if value not in captured)
            places = tuple(captured.index(value) for value in values)
            return Body(program, places, tuple(_blank(value) for value in graph.outputs))

        view = Node(node, self._opset(node), prepare)
        operator = self._operators.get((_domain(node.domain), node.op_type))
        if operator is None:
            raise ModelError(
                view.label,
                "the operator is not supported on the torch carrier",
                "run the model in ONNX Runtime, or export it without this operator",
            )
        try:
            run, train = operator.prepared(view)
        except ModelError:
            if operator.otherwise is None:
                raise
            run, train = operator.otherwise.prepared(view)
        inputs = tuple(_slot(slots, value) for value in (*view.inputs, *captured))
        outputs = tuple(_slot(slots, value) for value in node.outputs)
        return Step(run, inputs, outputs, operator.host, view.label, train)


def _ordered(steps: list[Step], graph: ir.Graph) -> list[Step]:
    """Return the steps so that each comes after those whose outputs it reads."""
    places = {slot: place for place, step in enumerate(steps) for slot in step.outputs if slot}
    before = {
        place: [places[slot] for slot in step.inputs if slot in places]
        for place, step in enumerate(steps)
    }
    if all(made < place for place, makers in before.items() for made in makers):
        return steps
    try:
        return [steps[place] for place in TopologicalSorter(before).static_order()]
    except CycleError as error:
        raise ModelError(
            f"graph '{graph.name}'", "its nodes form a cycle", "check the file with onnx.checker"
        ) from error


def _slot(slots: dict[ir.Value | None, int], value: ir.Value | None) -> int:
    return slots.setdefault(value, len(slots))


def _check_input(value: ir.Value) -> None:
    kind = type(value.type).__name__
    if value.dtype == ir.DataType.STRING or not isinstance(value.type, ir.TensorType | None):
        problem = "it holds strings" if kind == "TensorType" else f"it is a {kind}, not a tensor"
        remedy = "run the model in ONNX Runtime, or move what takes this input out of it"
        raise ModelError(f"input '{value.name}'", problem, remedy)


def _blank(value: ir.Value) -> torch.Tensor:
    """Return no elements of an output, of the type and shape that the graph declares."""
    shape = () if value.shape is None else value.shape
    sizes = [size if isinstance(size, int) else 0 for size in shape]
    dtype = torch.float32 if value.dtype is None else TORCH_DTYPES.get(value.dtype)
    return torch.empty((0, *sizes), dtype=dtype)


def _constant(node: ir.Node, opset: int) -> torch.Tensor:
    """Return the value of a ``Constant`` node."""
    try:
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
    except ValueError:
        tensor = None
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        raise ModelError(
            describe(node, opset),
            "the constant is a string, a sparse tensor, or has no value",
            "run the model in ONNX Runtime, or export it without this",
        )
    return from_numpy(tensor)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
