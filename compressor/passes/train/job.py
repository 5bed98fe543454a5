"""What is trained, and for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from compressor.passes.train.steps import Micro


class Objective(Protocol):
    """What training makes small."""

    def losses(self, outputs: Mapping[str, Tensor], micro: Micro, step: int) -> dict[str, Tensor]:
        """Return the terms of the loss by name, weighted already.

        Args:
            outputs: of the trained module.
            micro: what it was run on.
            step: the step, from 0.

        Returns:
            One value a sample for each term, ``[N]``. The loss is the mean over the samples of
            the sum of the terms.

        Raises:
            DataError: the target does not fit the outputs.
        """
        ...


class Regulator(Protocol):
    """Something that is done at every step beside the gradient step, such as pruning."""

    def before(self, step: int) -> None:
        """Act before a step's forward."""
        ...

    def after(self, step: int) -> None:
        """Act once the weights have been moved."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be saved; tensors, numbers and text only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what :meth:`state_dict` returned."""
        ...


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with a learning rate of their own.

    Attributes:
        names: the parameters.
        rate: what the learning rate is multiplied with.
        decay: whether weight decay acts on them.
    """

    names: frozenset[str]
    rate: float = 1.0
    decay: bool = False


@dataclass(frozen=True)
class Job:
    """A module and what it is trained for.

    Attributes:
        name: the pass, for messages.
        module: takes the model's inputs by name, and returns tensors by name. It is trained in
            place.
        objective: the loss.
        inputs: names of the model's inputs.
        outputs: names of those of its outputs that are the model's, which a metric sees.
        regulators: what else is done at each step.
        groups: parameters that are treated in a way of their own.
    """

    name: str
    module: nn.Module
    objective: Objective
    inputs: Sequence[str]
    outputs: Sequence[str]
    regulators: Sequence[Regulator] = ()
    groups: Sequence[ParameterGroup] = field(default=())
