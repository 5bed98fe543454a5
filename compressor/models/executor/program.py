"""A prepared graph: steps over numbered slots, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from compressor.errors import ModelError
from compressor.models.lazy_tensor import computed

Result: TypeAlias = "Tensor | tuple[Tensor | None, ...]"
Op: TypeAlias = Callable[..., Result]

ABSENT = 0
"""The slot of an input that is not given or of an output that nobody reads; it holds ``None``."""


@dataclass(frozen=True, slots=True)
class Step:
    """One node.

    Attributes:
        run: takes the inputs by position and returns the outputs.
        inputs: slots of the inputs.
        outputs: slots of the outputs.
        host: positions of inputs whose values are read in Python, so that they may stay on the
            CPU; ``None`` leaves every input where it is.
        label: the node's name, operator and opset, for messages.
        train: what runs in training instead, where that is something else.
        free: slots that nothing reads after this step.
    """

    run: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    host: frozenset[int] | None
    label: str
    train: Op | None = None
    free: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A graph or subgraph as a list of steps in topological order.

    Attributes:
        slots: how many values there are, the absent one counted.
        inputs: slots of the graph's inputs, followed by those of the values it captures.
        outputs: slots of the graph's outputs.
        steps: what to do.
    """

    slots: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]

    def __call__(self, arguments: Sequence[Tensor], training: bool = False) -> list[Tensor]:
        """Run on the graph's inputs followed by the captured values.

        Bodies of branches and loops always run as in evaluation.
        """
        values: list[Tensor | None] = [None] * self.slots
        for slot, argument in zip(self.inputs, arguments, strict=True):
            values[slot] = argument
        for step in self.steps:
            run = step.train if training and step.train is not None else step.run
            results = run_step(step, run, [values[slot] for slot in step.inputs])
            for slot, result in zip(step.outputs, results, strict=False):
                if slot:
                    values[slot] = result
            for slot in step.free:
                values[slot] = None
            del results
        return [computed(cast("Tensor", values[slot])) for slot in self.outputs]

    def host_slots(self) -> frozenset[int]:
        """Return the slots that are read in Python only, wherever they are read."""
        host: set[int] = set()
        other = set(self.outputs)
        for step in self.steps:
            for position, slot in enumerate(step.inputs):
                on_host = step.host is not None and position in step.host
                (host if on_host else other).add(slot)
        return frozenset(host - other)

    def with_lifetimes(self) -> Program:
        """Make each step free the values that it reads last, and drop outputs without readers."""
        alive = {ABSENT, *self.outputs}
        steps: list[Step] = []
        for step in reversed(self.steps):
            outputs = tuple(slot if slot in alive else ABSENT for slot in step.outputs)
            free = tuple(dict.fromkeys(slot for slot in step.inputs if slot not in alive))
            alive.update(step.inputs)
            steps.append(replace(step, outputs=outputs, free=free))
        return replace(self, steps=tuple(reversed(steps)))

    def split(self, captured: int) -> tuple[Program, Program]:
        """Divide the program into what does not depend on the graph's inputs and what does.

        Args:
            captured: how many of the values it takes are captured.

        Returns:
            A program that takes the captured values, and one that takes the graph's inputs, the
            captured values, and what the first returned.
        """
        slots = self.inputs[len(self.inputs) - captured :]
        constant_slots, constant, rest = {ABSENT, *slots}, list[Step](), list[Step]()
        for step in self.steps:
            if any(step.inputs) and constant_slots.issuperset(step.inputs):
                constant.append(step)
                constant_slots.update(step.outputs)
            else:
                rest.append(step)
        needed = {slot for step in rest for slot in step.inputs} | set(self.outputs)
        computed_slots = (slot for step in constant for slot in step.outputs if slot != ABSENT)
        made = tuple(slot for slot in computed_slots if slot in needed)
        return (
            Program(self.slots, slots, made, tuple(constant)).with_lifetimes(),
            replace(self, inputs=(*self.inputs, *made), steps=tuple(rest)).with_lifetimes(),
        )


@dataclass(frozen=True, slots=True)
class Body:
    """A subgraph of a node.

    Attributes:
        program: the subgraph; it takes its own inputs, then what it captures.
        captures: positions of what it captures among all values that the node captures.
        blanks: for each output, what it is when stacked over no runs at all.
    """

    program: Program
    captures: tuple[int, ...]
    blanks: tuple[Tensor, ...]

    def __call__(self, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> list[Tensor]:
        """Run on the subgraph's inputs and on the values that the node captures."""
        return self.program([*inputs, *(captured[position] for position in self.captures)])


def run_step(step: Step, run: Op, arguments: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run what a step calls on one device, and return its results.

    Raises:
        ModelError: it fails; the node and the shapes are named.
    """
    if step.host is not None:  # otherwise it has subgraphs, of which not all need run
        arguments = _aligned(
            [x if x is None or type(x) is Tensor else computed(x) for x in arguments], step.host
        )
    try:
        result = run(*arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(
            "none" if x is None else f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            for x in arguments
        )
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(
            step.label,
            f"cannot run on inputs {shapes}: {reason}",
            "check that the shapes and dtypes of the model's inputs are those it was exported with",
        ) from error
    return result if isinstance(result, tuple) else (result,)


def _aligned(arguments: list[Tensor | None], host: frozenset[int]) -> list[Tensor | None]:
    """Bring an operator's inputs to one device.

    Shapes and what is computed from them stay on the CPU; where they meet a tensor on an
    accelerator, they are sent there.
    """
    for x in arguments:
        if x is not None and not x.is_cpu:
            break
    else:
        return arguments
    free = {i: x for i, x in enumerate(arguments) if x is not None and i not in host}
    device = next((x.device for x in free.values() if not x.is_cpu), None)
    if device is None:
        return arguments
    return [
        free[i].to(device) if i in free and free[i].is_cpu else x for i, x in enumerate(arguments)
    ]


def bound_inputs(
    names: Sequence[str],
    arguments: Sequence[Tensor],
    inputs: Mapping[str, Tensor],
    optional: Sequence[Container[str]] = (),
) -> dict[str, Tensor]:
    """Return the inputs of a call by name.

    Args:
        names: what has to be given, in order.
        arguments: inputs by position.
        inputs: inputs by name.
        optional: in which there are further names that may be given.

    Raises:
        ModelError: an input is missing, unknown, given twice, or no tensor.
    """
    remedy = f"give {', '.join(names)}"
    if len(arguments) > len(names):
        problem = f"{len(arguments)} inputs are given, it has {len(names)}"
        raise ModelError("the ONNX graph", problem, remedy)
    by_name = dict(zip(names, arguments, strict=False))
    for name, value in inputs.items():
        if name in by_name:
            raise ModelError(f"input '{name}'", "is given twice", remedy)
        if name not in names and not any(name in weights for weights in optional):
            raise ModelError(f"input '{name}'", "is not in the graph", remedy)
        by_name[name] = value
    missing = next((name for name in names if name not in by_name), None)
    if missing is not None:
        raise ModelError(f"input '{missing}'", "is missing", "give every input of the graph")
    other = next((name for name, value in by_name.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        kind = type(by_name[other]).__name__
        raise ModelError(f"input '{other}'", f"is of type {kind}", "give a tensor of PyTorch")
    return by_name
