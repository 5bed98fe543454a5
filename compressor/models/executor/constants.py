"""What a program computes from its constants alone, apart from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compressor.models.executor.program import ABSENT, Program, Step


@dataclass(frozen=True, slots=True)
class Split:
    """A program in two parts.

    Attributes:
        constant: takes the captured values; its outputs are what the other part needs of it.
        rest: takes the graph's inputs, the captured values, and what ``constant`` returned.
    """

    constant: Program
    rest: Program


def split_constants(program: Program, captured: int) -> Split:
    """Divide a program into what depends on its inputs and what does not.

    Args:
        program: takes inputs, then captured values.
        captured: how many values it captures.
    """
    slots = program.inputs[len(program.inputs) - captured :]
    known, own, rest = {ABSENT, *slots}, list[Step](), list[Step]()
    for step in program.steps:
        fixed = any(step.inputs) and known.issuperset(step.inputs)
        (own if fixed else rest).append(step)
        if fixed:
            known.update(step.outputs)
    needed = {slot for step in rest for slot in step.inputs} | set(program.outputs)
    made = [slot for step in own for slot in step.outputs if slot != ABSENT and slot in needed]
    return Split(
        Program(program.slots, slots, tuple(made), with_lifetimes(own, made)),
        Program(
            program.slots,
            (*program.inputs, *made),
            program.outputs,
            with_lifetimes(rest, program.outputs),
        ),
    )


def with_lifetimes(steps: Sequence[Step], outputs: Sequence[int]) -> tuple[Step, ...]:
    """Let each step free what is read last by it, and drop outputs that nobody reads."""
    alive = {ABSENT, *outputs}
    result: list[Step] = []
    for step in reversed(steps):
        kept = tuple(slot if slot in alive else ABSENT for slot in step.outputs)
        free = tuple(dict.fromkeys(slot for slot in step.inputs if slot not in alive))
        alive.update(step.inputs)
        result.append(replace(step, outputs=kept, free=free))
    return tuple(reversed(result))
