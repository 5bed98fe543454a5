"""From an ONNX graph to a program: operators resolved, slots numbered, lifetimes known."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import CodeType

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass

from compressor.errors import ModelError
from compressor.models.executor.constants import with_lifetimes
from compressor.models.executor.dtypes import TORCH_DTYPES
from compressor.models.executor.node import NodeView, describe
from compressor.models.executor.ops import OPERATORS
from compressor.models.executor.ops.constant import constant_tensor
from compressor.models.executor.program import ABSENT, Body, Op, Program, Step

OLDEST_OPSET = 7
"""Broadcasting has been what it is today since this opset."""

NEWEST_OPSET = 28
"""The newest opset whose operators have been compared with ONNX's own test cases."""


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


def _ordered(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes so that each comes after those whose outputs it reads."""
    nodes = list(graph)
    before: dict[ir.Node, list[ir.Node]] = {}
    in_order = True
    for node in nodes:
        producers = (value.producer() for value in _reads(node))
        before[node] = [made for made in producers if made is not None and made.graph is graph]
        in_order = in_order and all(made in before for made in before[node])
    if in_order:
        return nodes
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise ModelError(
            f"graph '{graph.name}'", "its nodes form a cycle", "check the file with onnx.checker"
        ) from error


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield what a node reads, and what its subgraphs capture."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            body = attribute.as_graph()
            yield from body.outputs
            for inner in body:
                yield from _reads(inner)


@dataclass
class _Scope:
    """The slots of one graph while it is compiled."""

    slots: dict[ir.Value, int] = field(default_factory=dict)
    captured: list[ir.Value] = field(default_factory=list)

    def define(self, value: ir.Value) -> int:
        slot = len(self.slots) + 1
        self.slots[value] = slot
        return slot

    def use(self, value: ir.Value | None) -> int:
        if value is None:
            return ABSENT
        slot = self.slots.get(value)
        if slot is None:
            slot = self.define(value)
            self.captured.append(value)
        return slot


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program and what it captures.

    Attributes:
        program: the program.
        captured: what it takes after its inputs: initializers and constants, and whatever else
            no node gives.
        constants: the values of ``Constant`` nodes.
    """

    program: Program
    captured: tuple[ir.Value, ...]
    constants: dict[ir.Value, torch.Tensor]


def compiled(model: ir.Model) -> Compiled:
    """Compile the graph of a model that is flattened.

    Raises:
        ModelError: an operator, attribute, type or the opset is not supported.
    """
    compiler = Compiler(dict(model.opset_imports))
    program, captured = compiler.compile(model.graph)
    return Compiled(program, tuple(captured), compiler.constants)


class Compiler:
    """Compiles the graphs of one model.

    Attributes:
        constants: the values of ``Constant`` nodes met so far, which become part of the module.
    """

    def __init__(self, opsets: dict[str, int]):
        self.constants: dict[ir.Value, torch.Tensor] = {}
        self._opsets = {_domain(name): version for name, version in opsets.items()}
        version = self._opsets.get("", NEWEST_OPSET)
        if not OLDEST_OPSET <= version <= NEWEST_OPSET:
            raise ModelError(
                "the ONNX graph",
                f"opset {version} is outside {OLDEST_OPSET} to {NEWEST_OPSET}",
                "convert the model with onnx.version_converter",
            )

    def compile(self, graph: ir.Graph) -> tuple[Program, list[ir.Value]]:
        """Return the program of a graph, and the values that it captures from outside.

        Initializers and constants are captured too, by whatever graph they belong to.

        Raises:
            ModelError: an operator, attribute or type is not supported.
        """
        scope = _Scope()
        own = [value for value in graph.inputs if not value.is_initializer()]
        for value in own:
            _check_input(value)
            scope.define(value)
        steps = [self._step(n, scope) for n in _ordered(graph) if not self._took_constant(n)]
        outputs = tuple(scope.use(value) for value in graph.outputs)
        taken = tuple(scope.slots[value] for value in (*own, *scope.captured))
        program = Program(len(scope.slots) + 1, taken, outputs, with_lifetimes(steps, outputs))
        return program, scope.captured

    def _took_constant(self, node: ir.Node) -> bool:
        if node.op_type != "Constant" or _domain(node.domain):
            return False
        view = NodeView(node, self._opset(node), _no_body)
        self.constants[node.outputs[0]] = constant_tensor(view)
        view.check_understood()
        return True

    def _opset(self, node: ir.Node) -> int:
        domain = _domain(node.domain)
        return node.version or self._opsets.get(domain) or (1 if domain else NEWEST_OPSET)

    def _step(self, node: ir.Node, scope: _Scope) -> Step:
        opset = self._opset(node)
        label = describe(node, opset)
        builder = OPERATORS.get((_domain(node.domain), node.op_type))
        if builder is None:
            raise ModelError(
                label,
                "the operator is not supported on the torch carrier",
                "run the model in ONNX Runtime, or export it without this operator",
            )
        captured: list[ir.Value] = []

        def prepare(graph: ir.Graph) -> Body:
            program, values = self.compile(graph)
            captured.extend(value for value in values if value not in captured)
            places = tuple(captured.index(value) for value in values)
            return Body(program, places, tuple(_blank(value) for value in graph.outputs))

        view = NodeView(node, opset, prepare)
        run = builder(view)
        view.check_understood()
        given = [*node.inputs, *captured]
        while given and given[-1] is None:
            given.pop()
        _check_inputs(view, run, len(given))
        inputs = tuple(scope.use(value) for value in given)
        outputs = tuple(scope.define(value) for value in node.outputs)
        host = None if view.host is None else frozenset(view.host)
        return Step(run, inputs, outputs, (), host, label, view.train)


def _check_inputs(view: NodeView, run: Op, count: int) -> None:
    code = getattr(run, "__code__", None)
    takes = (
        _takes(run) if code is None else _TAKES.get(code) or _TAKES.setdefault(code, _takes(run))
    )
    if not takes[0] <= count <= takes[1]:
        problem = f"it has {view.input_count} inputs, which the operator does not take"
        raise view.refuse(problem)


_TAKES: dict[CodeType, tuple[int, float]] = {}
"""How many inputs functions take; operators of one kind are closures of the same code."""


def _takes(run: Op) -> tuple[int, float]:
    """Return the least and the greatest number of inputs."""
    parameters = inspect.signature(run).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [parameter for parameter in parameters if parameter.kind in kinds]
    least = sum(parameter.default is parameter.empty for parameter in own)
    endless = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    return least, float("inf") if endless else len(own)


def _check_input(value: ir.Value) -> None:
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        raise ModelError(
            f"input '{value.name}'",
            f"it is a {type(value.type).__name__}, not a tensor",
            "run the model in ONNX Runtime, or export it with tensors only",
        )
    if value.dtype == ir.DataType.STRING:
        raise ModelError(
            f"input '{value.name}'",
            "it holds strings",
            "move the text processing out of the model, or run it in ONNX Runtime",
        )


def _blank(value: ir.Value) -> torch.Tensor:
    """Return no elements of an output, of the type and shape that the graph declares."""
    shape = () if value.shape is None else value.shape
    sizes = [size if isinstance(size, int) else 0 for size in shape]
    dtype = torch.float32 if value.dtype is None else TORCH_DTYPES.get(value.dtype)
    return torch.empty((0, *sizes), dtype=dtype)


def _no_body(graph: ir.Graph) -> Body:
    raise ModelError(f"graph '{graph.name}'", "a constant has no subgraph", "export it again")


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
