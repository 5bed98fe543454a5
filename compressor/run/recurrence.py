"""Models that carry a state: run sequences step by step, each with the state of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.errors import DataError, SpecError, suggestion
from compressor.types.carrier import Runner
from compressor.types.tensors import Array, Batch, Feed, TensorSpec


class FeedSequence(Feed):
    """Feeds for one step after the other: an array may have the steps as one more, first axis.

    One of the rank that the model's input has is the same in each step. A state may be given as it
    is before the first step; else it starts with zeros.
    """


@dataclass(frozen=True)
class Recurrence:
    """How a model's state goes on from step to step.

    Attributes:
        inputs: the model's.
        state: the place of an output among the model's outputs, by the input that takes it in the
            next step. Outputs pair by place: artifacts may have other names.
        outputs: how many outputs the model has.
        subject: how errors name the sequences.
    """

    inputs: tuple[TensorSpec, ...]
    state: Mapping[str, int]
    outputs: int
    subject: str

    def first(self, sequence: Batch) -> Feed:
        """Return what a model takes in the first step.

        Raises:
            DataError: the steps do not show.
        """
        return self._feed(sequence, 0, {})

    def steps(
        self, sequence: Batch, run: Callable[[Batch], Batch]
    ) -> Iterator[tuple[Feed, list[Array]]]:
        """Yield each step's feed and the model's outputs, in their order.

        Raises:
            DataError: the steps do not show, or a state does not keep its shape.
        """
        state: dict[str, Array] = {}
        for index in range(self._length(sequence)):
            feed = self._feed(sequence, index, state)
            outputs = list(run(feed).values())
            state = {name: outputs[place] for name, place in self.state.items()}
            for name, array in state.items():
                if array.shape != feed[name].shape:
                    raise DataError(
                        f"state {name!r}",
                        f"goes into step {index} with shape {list(feed[name].shape)}, and comes "
                        f"out with shape {list(array.shape)}",
                        "a state that is carried keeps its shape; if it starts with another shape "
                        "than the data's batch suggests, store its first value in the data",
                    )
            yield feed, outputs

    @property
    def judged(self) -> tuple[int, ...]:
        """The outputs that are no state; all if each of them is one."""
        others = tuple(i for i in range(self.outputs) if i not in self.state.values())
        return others or tuple(range(self.outputs))

    def _stepped(self, sequence: Batch) -> dict[str, int]:
        """Return the number of steps of the arrays that have an axis for them."""
        ranks = {i.name: len(i.shape) for i in self.inputs if i.name not in self.state}
        return {
            name: len(sequence[name])
            for name, rank in ranks.items()
            if name in sequence and sequence[name].ndim == rank + 1
        }

    def _length(self, sequence: Batch) -> int:
        lengths = self._stepped(sequence)
        if len(set(lengths.values())) == 1 and any(lengths.values()):
            return next(iter(lengths.values()))
        shapes = {i.name: list(sequence[i.name].shape) for i in self.inputs if i.name in sequence}
        listed = ", ".join(f"{name!r} {shape}" for name, shape in shapes.items())
        takes = next((i for i in self.inputs if i.name not in self.state), self.inputs[0])
        several = len(set(lengths.values())) > 1
        problem = (
            "a sequence whose arrays have different numbers of steps" if several else "no steps"
        )
        raise DataError(
            self.subject,
            f"has {problem}: {listed}",
            f"give each array that changes as [steps, ...], before the axes of {takes}, and one "
            "that does not without that axis",
        )

    def _feed(self, sequence: Batch, index: int, state: Mapping[str, Array]) -> Feed:
        self._length(sequence)
        stepped = self._stepped(sequence)
        feed = Feed(
            (i.name, np.asarray(sequence[i.name][index] if i.name in stepped else sequence[i.name]))
            for i in self.inputs
            if i.name in sequence
        )
        for spec in self.inputs:
            if spec.name in state:
                feed[spec.name] = state[spec.name]
            elif spec.name in self.state and spec.name not in feed:
                feed[spec.name] = self._zeros(spec, feed)
        return feed

    def _zeros(self, spec: TensorSpec, feed: Batch) -> Array:
        """Return a state to start with; a dynamic axis is as long as in the other inputs.

        One that they do not name is as long as their first axis, which is usually the batch.
        """
        lengths: dict[int | str | None, int] = {
            axis: length
            for other in self.inputs
            if other.name in feed
            for axis, length in zip(other.shape, feed[other.name].shape, strict=False)
            if isinstance(axis, str)
        }
        batch = next((len(array) for array in feed.values() if array.ndim), 1)
        shape = [d if isinstance(d, int) else lengths.get(d, batch) for d in spec.shape]
        return np.zeros(shape, spec.dtype)


class RecurrentRunner:
    """Runs sequences, and returns the outputs of all steps with these as first axis; no states."""

    def __init__(self, runner: Runner, recurrence: Recurrence):
        self._runner = runner
        self._recurrence = recurrence

    @property
    def runtime(self) -> str:
        """Name and version of what executes the model."""
        return self._runner.runtime

    def run(self, batch: Batch) -> Batch:
        """Run a sequence step by step, or anything else at once.

        Raises:
            DataError: a state or an output does not keep its shape.
        """
        if not isinstance(batch, FeedSequence):
            return self._runner.run(batch)
        names: list[str] = []

        def run(feed: Batch) -> Batch:
            outputs = self._runner.run(feed)
            names[:] = outputs
            return outputs

        steps = [outputs for _, outputs in self._recurrence.steps(batch, run)]
        return {
            names[place]: _stacked(names[place], [outputs[place] for outputs in steps])
            for place in self._recurrence.judged
        }


def _stacked(name: str, arrays: Sequence[Array]) -> Array:
    for index, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"output {name!r}",
                f"has shape {list(arrays[0].shape)}, and in step {index} {list(array.shape)}",
                "give sequences whose steps have the same shapes",
            )
    return np.stack(arrays)


def make_recurrence(
    state: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    subject: str,
) -> Recurrence:
    """Return how a state goes on, by the names of inputs and the outputs that they take.

    Args:
        subject: how errors name the sequences.

    Raises:
        SpecError: there is no such input or output, or the output does not fit the input.
    """
    takes, gives = ({spec.name: spec for spec in specs} for specs in (inputs, outputs))
    for name, output in state.items():
        for kind, key, specs in (("input", name, takes), ("output", output, gives)):
            if key not in specs:
                raise SpecError(
                    f"state {name!r}",
                    f"{key!r} is not an {kind} of the model",
                    suggestion(key, specs),
                )
        want, have = takes[name], gives[output]
        typed = have.dtype != "unknown" and bool(have.shape)  # a graph may not say
        if typed and not want.fits(have):
            raise SpecError(
                f"state {name!r}",
                f"is {want}, and the output that it takes is {have}",
                "name the output that is the next step's state; it has the same shape",
            )
    places = {spec.name: place for place, spec in enumerate(outputs)}
    taken = {name: places[output] for name, output in state.items()}
    return Recurrence(tuple(inputs), taken, len(outputs), subject)
