"""An ONNX graph as a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any, NoReturn, Self

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from compressor.errors import ModelError
from compressor.models.executor.compiler import Compiled, compiled, flattened
from compressor.models.executor.constants import Split, split_constants
from compressor.models.executor.convert import from_numpy
from compressor.models.executor.program import Program

_SHAPE_SIZED = 1024
"""Tensors of ``int64`` up to this many elements are taken for shapes, axes and indices."""

FIRST_CALL = Lock()
"""Held while constants are computed, so that they are in memory once; all modules share it."""


_SHARED = ("_linked", "_constants", "_read")
"""What copies of a module share: it never changes."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A program and what it captures.

    Attributes:
        program: the program.
        split: the same, what it computes of constants alone apart; ``None`` if it is not kept.
        captured: names of the tensors that it captures, in order.
        pinned: names of those that stay on the CPU.
    """

    program: Program
    split: Split | None
    captured: tuple[str, ...]
    pinned: frozenset[str]


class GraphModule(nn.Module):
    """Runs an ONNX graph with torch operators, on any device and differentiably.

    Every initializer is a buffer under its ONNX name, whatever characters that holds, so
    `state_dict` and `load_state_dict` speak the names of the graph. Nothing is copied on
    construction; a memory-mapped tensor is read when an operator reads it. Operators, attributes
    and element types are checked on construction too. The given model is never changed.

    With parameters the module can be trained: in training mode its batch normalizations use the
    statistics of the batch, and move their running ones in place. Without, it is for evaluation,
    in whatever mode, since its tensors may lie in a file.

    Integer arithmetic on shapes stays on the CPU: small ``int64`` buffers, and those whose values
    are only read in Python, do not move with the module. Where the former meet a tensor on an
    accelerator they are sent there.

    Args:
        model: the graph, of opset 7 to 28.
        tensors: values of initializers by name, kept as they are given. Elements of less than
            eight bits are unpacked, one a byte. Names that the graph does not have are ignored;
            an initializer that is not here has the value the model gives it.
        parameters: the same for those that are trained; the same one under two names is tied.
        keeps_constants: the first call in evaluation keeps what it computes from initializers
            alone, such as dequantized weights, until an initializer is replaced or moved.

    Attributes:
        input_names: the inputs that a call has to give, in order.
        output_names: the outputs, in order.

    Raises:
        ModelError: an operator, an attribute, an element type or the opset is not supported, or
            an initializer has no value or another shape than the graph says.
    """

    def __init__(
        self,
        model: ir.Model,
        tensors: Mapping[str, Tensor] | None = None,
        parameters: Mapping[str, nn.Parameter] | None = None,
        *,
        keeps_constants: bool = False,
    ):
        super().__init__()
        model = flattened(model)
        unlinked = compiled(model)
        names = self._take_initializers(model.graph, {**(tensors or {}), **(parameters or {})})
        self._keeps_constants = keeps_constants
        self._constants: list[Tensor] | None = None
        self._linked: Linked | None = self._link(unlinked, names)
        self.input_names = tuple(
            value.name or "" for value in model.graph.inputs if not value.is_initializer()
        )
        self.output_names = tuple(value.name or "" for value in model.graph.outputs)

    def forward(self, *arguments: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Run the graph.

        Args:
            arguments: inputs by position, in the order of `input_names`.
            inputs: inputs by name. An initializer's name is taken too, and replaces its value in
                this call, which is how a weight is tried without being changed.

        Returns:
            The outputs by name, in the order of `output_names`.

        Raises:
            ModelError: an input is missing or unknown, or a node cannot run on what it is given.
        """
        linked = self._ready()
        given = self._bind(arguments, inputs)
        values = [given[name] for name in self.input_names]
        for name in linked.captured:
            value = given.get(name)
            values.append(self._held(name) if value is None else value)
        trains = self.training and bool(self._parameters)
        if linked.split is None or trains or len(given) > len(self.input_names):
            outputs = linked.program(values, trains)
        else:
            captured = values[len(self.input_names) :]
            outputs = linked.split.rest([*values, *self._kept(linked.split.constant, captured)])
        return dict(zip(self.output_names, outputs, strict=True))

    def get_buffer(self, target: str) -> Tensor:
        """Return the initializer of this name; unlike in other modules a dot means nothing.

        Raises:
            AttributeError: there is none, or it is a parameter.
        """
        value = self._buffers.get(target)
        if value is None:
            raise AttributeError(f"the graph has no initializer '{target}'")
        return value

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter of this name; unlike in other modules a dot means nothing.

        Raises:
            AttributeError: there is none.
        """
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

        Returns:
            What the method of ``nn.Module`` returns: the missing and the unexpected names.

        Raises:
            ModelError: ``strict``, and a name is missing or unexpected; or a shape is another.
            ValueError: ``assign`` is false.
        """
        if not assign:
            raise ValueError("the tensors are shared and cannot be written to; use assign=True")
        known = self.state_dict()
        missing = [name for name in known if name not in state_dict]
        unexpected = [name for name in state_dict if name not in known]
        if strict and (missing or unexpected):
            problem = "is missing" if missing else "is not in the graph"
            raise ModelError(
                f"initializer '{(missing or unexpected)[0]}'", problem, "load with strict=False"
            )
        for name, value in state_dict.items():
            if name not in unexpected:
                _check_shape(name, known[name].shape, value)
                self._assign(name, value)
        return _IncompatibleKeys(missing, unexpected)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the tensors; the program cannot change and is shared."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = value if name in _SHARED else deepcopy(value, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled: a program is functions.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a graph cannot be pickled; pickle its state_dict(), or give other processes the path "
            "and let them call compressor.load"
        )

    def extra_repr(self) -> str:
        """Return the names and the size for ``repr``."""
        return f"inputs={list(self.input_names)}, outputs={list(self.output_names)}"

    def _ready(self) -> Linked:
        """Return the program; a class that compiles later does it here."""
        assert self._linked is not None
        return self._linked

    def _link(self, unlinked: Compiled, names: dict[ir.Value, str]) -> Linked:
        """Connect a program with the tensors that it captures."""
        names = {**names, **self._take_constants(unlinked.constants)}
        for value in unlinked.captured:
            if value not in names:
                raise ModelError(
                    f"value '{value.name}'",
                    "it is read, but no node, input or initializer gives it",
                    "check the file with onnx.checker",
                )
        program = unlinked.program
        captured = tuple(names[value] for value in unlinked.captured)
        on_host = program.host_slots()
        slots = program.inputs[len(program.inputs) - len(captured) :]
        pinned = frozenset(
            name
            for name, slot in zip(captured, slots, strict=True)
            if name in self._buffers and (slot in on_host or _is_shape(self._buffers[name]))
        )
        split = split_constants(program, len(captured)) if self._keeps_constants else None
        return Linked(program, split, captured, pinned)

    def _bind(self, arguments: tuple[Tensor, ...], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(arguments) > len(self.input_names):
            raise ModelError(
                "the ONNX graph",
                f"{len(arguments)} inputs are given, it has {len(self.input_names)}",
                f"give {', '.join(self.input_names)}",
            )
        given = dict(zip(self.input_names, arguments, strict=False))
        for name, value in inputs.items():
            known = name in self.input_names or name in self._buffers or name in self._parameters
            if name in given or not known:
                problem = "is given twice" if name in given else "is not in the graph"
                raise ModelError(f"input '{name}'", problem, f"give {', '.join(self.input_names)}")
            given[name] = value
        missing = next((name for name in self.input_names if name not in given), None)
        if missing is not None:
            raise ModelError(f"input '{missing}'", "is missing", "give every input of the graph")
        return given

    def _take_initializers(
        self, graph: ir.Graph, tensors: Mapping[str, Tensor]
    ) -> dict[ir.Value, str]:
        names: dict[ir.Value, str] = {}
        for value in initializers(graph):
            names[value] = self._hold(value.name or "", _initial(value, tensors))
        return names

    def _take_constants(self, constants: Mapping[ir.Value, Tensor]) -> dict[ir.Value, str]:
        names: dict[ir.Value, str] = {}
        for value, tensor in constants.items():
            names[value] = self._hold(value.name or "constant", tensor)
            self._non_persistent_buffers_set.add(names[value])
        return names

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

    def _held(self, name: str) -> Tensor:
        parameter = self._parameters.get(name)
        value = self._buffers.get(name) if parameter is None else parameter
        assert value is not None
        return value

    def _kept(self, program: Program, captured: Sequence[Tensor]) -> list[Tensor]:
        """Return what the program computes of the captured values, computed at the first call."""
        found = self._constants
        if found is None:
            with FIRST_CALL:
                if self._constants is None:
                    self._constants = program(captured)
                found = self._constants
        return found

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


def _is_shape(value: Tensor | None) -> bool:
    return value is not None and value.dtype == torch.int64 and value.numel() <= _SHAPE_SIZED


def initializers(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the initializers of a graph and of its subgraphs."""
    yield from graph.initializers.values()
    for subgraph in graph.subgraphs():
        yield from subgraph.initializers.values()


def _initial(value: ir.Value, tensors: Mapping[str, Tensor]) -> Tensor:
    name = value.name or ""
    known = value.const_value
    given = tensors.get(name)
    shape = value.shape if known is None else known.shape
    if given is None:
        if known is None:
            raise ModelError(
                f"initializer '{name}'", "it has no value", "give its tensor, or the file it is in"
            )
        return from_numpy(known)
    if shape is not None:
        sizes = [size for size in shape if isinstance(size, int)]
        if len(sizes) == len(shape):
            _check_shape(name, sizes, given)
    return given


def _check_shape(name: str, shape: Sequence[int], given: Tensor) -> None:
    if tuple(shape) != tuple(given.shape):
        raise ModelError(
            f"initializer '{name}'",
            f"the tensor given has shape {list(given.shape)}, the graph says {list(shape)}",
            "change the graph and the tensor together",
        )
