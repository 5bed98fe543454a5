"""An ONNX graph as a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn, Self, cast

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from compressor.errors import ModelError
from compressor.models.element_types import from_numpy
from compressor.models.executor.compiler import Compiler, flattened
from compressor.models.executor.node import Operators
from compressor.models.executor.program import Program, bound_inputs
from compressor.models.lazy_tensor import check_ahead

_SHAPE_SIZED = 1024
"""Tensors of ``int64`` up to this many elements are taken for shapes, axes and indices."""

_FIRST_CALL = Lock()
"""Held while constants are computed, so that they are in memory once; all modules share it."""

_SHARED = ("_compiled", "_constants", "_read")  # by copies of a module: it never changes


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A program and what it captures.

    Attributes:
        program: the program, or what is left of it without ``constant``.
        constant: computes of what is captured alone what is kept; ``None`` if nothing is.
        captured: names of the tensors that it captures, in order.
        pinned: names of those that stay on the CPU.
    """

    program: Program
    constant: Program | None
    captured: tuple[str, ...]
    pinned: frozenset[str]


class GraphModule(nn.Module):
    """Runs an ONNX graph with torch operators, on any device and differentiably.

    Every initializer is a buffer under its ONNX name, whatever characters that holds, so
    `state_dict` and `load_state_dict` speak the names of the graph. Nothing is copied on
    construction; a memory-mapped tensor is read when an operator reads it. The given model is
    never changed.

    With parameters the module can be trained: in training mode its batch normalizations use the
    statistics of the batch, and move their running ones in place. Without, it is for evaluation,
    in whatever mode, since its tensors may lie in a file.

    Integer arithmetic on shapes stays on the CPU: small ``int64`` buffers, and those whose values
    are only read in Python, do not move with the module. Where the former meet a tensor on an
    accelerator they are sent there.

    Args:
        model: the graph, of opset 13 to 28.
        tensors: values of initializers by name, kept as they are given. Elements of less than
            eight bits are unpacked, one a byte. Names that the graph does not have are ignored;
            an initializer that is not here has the value the model gives it.
        parameters: the same for those that are trained; the same one under two names is tied.
        keeps_constants: the first call in evaluation keeps what it computes from initializers
            alone, such as dequantized weights, until an initializer is replaced or moved.
        operators: further operators, by domain and name, beside the executor's own.

    Attributes:
        input_names: the inputs that a call has to give, in order.
        output_names: the outputs, in order.

    Raises:
        ModelError: an operator, an attribute, an element type or the opset is not supported, or
            an initializer has no value or another shape than the graph says.
    """

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    _read: Callable[[], ir.Model]
    _compiled: _Compiled | None = None
    _constants: list[Tensor] | None = None
    _checked = False

    def __init__(
        self,
        model: ir.Model,
        tensors: Mapping[str, Tensor] | None = None,
        parameters: Mapping[str, nn.Parameter] | None = None,
        *,
        keeps_constants: bool = False,
        operators: Operators | None = None,
    ):
        super().__init__()
        self._keeps_constants = keeps_constants
        given = {**(tensors or {}), **(parameters or {})}
        self._compiled = self._compile(
            model,
            operators or {},
            lambda value: self._hold(value.name or "", _initial(value, given)),
        )
        self.input_names, self.output_names = _interface(model.graph)

    @classmethod
    def deferred(
        cls,
        read: Callable[[], ir.Model],
        tensors: Mapping[str, Tensor],
        input_names: Sequence[str],
        output_names: Sequence[str],
        *,
        keeps_constants: bool = False,
    ) -> Self:
        """Return a module whose graph is known to be sound, and is not looked at before needed.

        Args:
            read: returns the graph; called once, by the first call or the first move to a device.
                All of its initializers belong to the main graph.
            tensors: the value of every initializer, by name.
            input_names: the graph's inputs, in order.
            output_names: its outputs.
            keeps_constants: whether the first call keeps what it computes from initializers alone.
        """
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._keeps_constants = keeps_constants
        for name, tensor in tensors.items():
            module._hold(name, tensor)
        module._read = read
        module.input_names, module.output_names = tuple(input_names), tuple(output_names)
        return module

    def forward(self, *arguments: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Run the graph.

        Args:
            arguments: inputs by position, in the order of `input_names`.
            inputs: inputs by name. An initializer's name is taken too, and replaces its value in
                this call, which is how a weight is tried without being changed.

        Returns:
            The outputs by name, in the order of `output_names`.

        Raises:
            ModelError: an input is missing, unknown or no tensor, or a node cannot run on what it
                is given.
        """
        compiled = self._ready()
        weights = self._buffers, self._parameters
        by_name = bound_inputs(self.input_names, arguments, inputs, weights)
        held = cast("dict[str, Tensor]", {**self._buffers, **self._parameters, **by_name})
        values = [held[name] for name in (*self.input_names, *compiled.captured)]
        if not self._checked:
            self._checked = not check_ahead(values)
        trains = self.training and bool(self._parameters)
        if compiled.constant is not None:
            captured = values[len(self.input_names) :]
            if trains or len(by_name) > len(self.input_names):
                values += compiled.constant(captured, trains)
            else:
                values += self._kept(compiled.constant, captured)
        return dict(zip(self.output_names, compiled.program(values, trains), strict=True))

    def get_buffer(self, target: str) -> Tensor:
        """Return the initializer of this name; unlike in other modules a dot means nothing."""
        value = self._buffers.get(target)
        if value is None:
            raise AttributeError(f"the graph has no initializer '{target}'")
        return value

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter of this name; unlike in other modules a dot means nothing."""
        value = self._parameters.get(target)
        if value is None:
            raise AttributeError(f"the graph has no parameter '{target}'")
        return value

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = True
    ) -> Any:
        """Take other values for the initializers, by their ONNX names.

        Values are assigned, never copied into place: that would write to the tensors of
        the model or of the checkpoint file that this module shares. A tied parameter is replaced
        under all of its names.

        Returns the missing and the unexpected names.

        Raises:
            ModelError: ``strict``, and a name is missing or unexpected; or a shape is another.
            ValueError: ``assign`` is false.
        """
        if not assign:
            raise ValueError("the tensors are shared and cannot be written to; use assign=True")
        state = self.state_dict()
        missing = [name for name in state if name not in state_dict]
        unexpected = [name for name in state_dict if name not in state]
        if strict and (missing or unexpected):
            problem = "is missing" if missing else "is not in the graph"
            raise ModelError(
                f"initializer '{(missing or unexpected)[0]}'", problem, "load with strict=False"
            )
        for name, value in state_dict.items():
            if name not in unexpected:
                _check_shape(name, state[name].shape, value)
                self._assign(name, value)
        return _IncompatibleKeys(missing, unexpected)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],  # noqa: ARG002
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take other values as a part of a module that loads its state.

        PyTorch's own way takes a dot for a child's. Values are copied into place where they are
        trained, as an optimizer holds the tensors, and assigned where they may lie in a file.
        """
        own = self.state_dict()
        given = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
        if strict:
            missing_keys += [prefix + name for name in own if name not in given]
            others = (key for key in state_dict if key.startswith(prefix))
            unexpected_keys += [key for key in others if key.removeprefix(prefix) not in own]
        for name, value in given.items():
            if own[name].shape != value.shape:
                wrong = f"{list(value.shape)}, and not {list(own[name].shape)}"
                error_msgs.append(f"{prefix}{name!r} has shape {wrong}")
            elif self._parameters:
                own[name].copy_(value)
            else:
                self._assign(name, value)
        self._constants = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the tensors; the program cannot change and is shared."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = value if name in _SHARED else deepcopy(value, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled: a program is functions."""
        raise TypeError(
            "a graph cannot be pickled; pickle its state_dict(), or give other processes the path "
            "and let them call compressor.load"
        )

    def extra_repr(self) -> str:
        """Return the names for ``repr``."""
        return f"inputs={list(self.input_names)}, outputs={list(self.output_names)}"

    def _ready(self) -> _Compiled:
        """Return the program; a graph that was deferred is compiled here."""
        if self._compiled is None:
            with _FIRST_CALL:
                if self._compiled is None:
                    model = self._read()
                    if _interface(model.graph) != (self.input_names, self.output_names):
                        problem = "has other inputs or outputs than were listed"
                        raise ModelError("graph", problem, "it was edited; export it again")
                    self._compiled = self._compile(model, {}, lambda v: v.name or "")
        return self._compiled

    def _compile(
        self, model: ir.Model, operators: Operators, hold: Callable[[ir.Value], str]
    ) -> _Compiled:
        """Compile a graph and connect it with the tensors that it captures.

        Args:
            model: the graph.
            operators: further operators.
            hold: returns the name under which the module holds an initializer.
        """
        model = flattened(model)
        compiler = Compiler(model.opset_imports, operators)
        program, values = compiler.compile(model.graph)
        names = {value: hold(value) for value in _initializers(model.graph)}
        for value, tensor in compiler.constants.items():
            names[value] = self._hold(value.name or "constant", tensor)
            self._non_persistent_buffers_set.add(names[value])
        for value in values:
            if value not in names:
                raise ModelError(
                    f"value '{value.name}'",
                    "it is read, but no node, input or initializer provides it",
                    "check the file with onnx.checker",
                )
        captured = tuple(names[value] for value in values)
        on_host = program.host_slots()
        slots = program.inputs[len(program.inputs) - len(captured) :]
        pinned = frozenset(
            name
            for name, slot in zip(captured, slots, strict=True)
            if name in self._buffers and (slot in on_host or _is_shape(self._buffers[name]))
        )
        constant = None
        if self._keeps_constants:
            constant, program = program.split(len(captured))
        return _Compiled(program, constant, captured, pinned)

    def _hold(self, name: str, tensor: Tensor) -> str:
        """Register a buffer or parameter and return its name, another one where that is taken.

        ``register_buffer`` refuses names with dots, which ONNX names are full of, though nothing
        that a buffer is for (``state_dict``, ``to``) minds them; nor do parameters.
        """
        free, count = name, 1
        while free in self._buffers or free in self._parameters:
            count += 1
            free = f"{name}#{count}"
        if isinstance(tensor, nn.Parameter):
            self._parameters[free] = tensor
        else:
            self._buffers[free] = tensor
        return free

    def _kept(self, program: Program, captured: Sequence[Tensor]) -> list[Tensor]:
        """Return what the program computes of the captured values, computed at the first call."""
        if self._constants is None:
            with _FIRST_CALL:
                if self._constants is None:
                    self._constants = program(captured)
        return self._constants

    def _assign(self, name: str, value: Tensor) -> None:
        self._constants = None
        old = self._parameters.get(name)
        if old is None:  # training moves buffers in place
            self._buffers[name] = value.clone() if self._parameters else value
            return
        value = value.detach().to(old.dtype, copy=True)
        new = nn.Parameter(value, requires_grad=old.requires_grad)
        for other in [other for other, held in self._parameters.items() if held is old]:
            self._parameters[other] = new

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        pinned = {name: self._buffers[name] for name in self._ready().pinned}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update(pinned)
        self._constants = None
        return self


def _interface(graph: ir.Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the inputs that a call gives, and of the outputs."""
    inputs = (value for value in graph.inputs if not value.is_initializer())
    return tuple(v.name or "" for v in inputs), tuple(v.name or "" for v in graph.outputs)


def _is_shape(value: Tensor | None) -> bool:
    return value is not None and value.dtype == torch.int64 and value.numel() <= _SHAPE_SIZED


def _initializers(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the initializers of a graph and of its subgraphs."""
    yield from graph.initializers.values()
    for subgraph in graph.subgraphs():
        yield from subgraph.initializers.values()


def _initial(value: ir.Value, tensors: Mapping[str, Tensor]) -> Tensor:
    name = value.name or ""
    stored, tensor = value.const_value, tensors.get(name)
    if tensor is None:
        if stored is None:
            raise ModelError(
                f"initializer '{name}'", "it has no value", "give its tensor, or the file it is in"
            )
        return from_numpy(stored)
    shape = value.shape if stored is None else stored.shape
    if shape is not None and all(isinstance(size, int) for size in shape):
        _check_shape(name, shape.numpy(), tensor)
    return tensor


def _check_shape(name: str, shape: Sequence[int], tensor: Tensor) -> None:
    if tuple(shape) != tuple(tensor.shape):
        raise ModelError(
            f"initializer '{name}'",
            f"the tensor given has shape {list(tensor.shape)}, the graph says {list(shape)}",
            "change the graph and the tensor together",
        )
