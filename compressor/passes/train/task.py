"""The loss of the task that a network is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compressor.errors import DataError, SpecError
from compressor.passes.train.losses import cross_entropy, squared_error
from compressor.passes.train.recipe import Recipe
from compressor.passes.train.steps import Micro
from compressor.types.passes import PassContext
from compressor.types.training import Training

Each: TypeAlias = Callable[[Mapping[str, Tensor], Tensor], Tensor]

CROSS_ENTROPY, MSE = "cross-entropy", "mse"
_BY_METRIC = {
    "accuracy": CROSS_ENTROPY,
    "top5": CROSS_ENTROPY,
    "perplexity": CROSS_ENTROPY,
    "mse": MSE,
    "cosine": MSE,
}


def loss_name(loss: str | None, metric: str | None) -> str:
    """Return which loss is meant.

    Raises:
        SpecError: it is not given, and the metric does not tell.
    """
    if loss is not None:
        if loss not in (CROSS_ENTROPY, MSE) and ":" not in loss:
            raise SpecError(
                "loss", f"is {loss!r}", f"set {CROSS_ENTROPY}, {MSE} or package.module:function"
            )
        return loss
    found = _BY_METRIC.get(metric or "")
    if found is None:
        known = "there is no metric" if metric is None else f"metric {metric!r} does not tell it"
        raise SpecError("loss", f"is not given, and {known}", f"set loss, such as {CROSS_ENTROPY}")
    return found


def task_loss(
    recipe: Recipe, outputs: Sequence[str], training: Training, context: PassContext
) -> TaskLoss:
    """Return the loss against the target that a recipe and the metric mean.

    Args:
        recipe: may name the loss.
        outputs: names of the model's outputs.
        training: data.
        context: has the metric.

    Raises:
        SpecError: no loss is given, and the metric does not tell.
    """
    return TaskLoss(loss_name(recipe.loss, context.metric), outputs, training)


class TaskLoss:
    """The loss against the target of the training data.

    Args:
        name: as :func:`loss_name` returns it.
        outputs: names of the model's outputs; the first one is compared.
        training: data, and the function that the name may be one of.
    """

    def __init__(self, name: str, outputs: Sequence[str], training: Training):
        self._name = name
        self._outputs = tuple(outputs)
        self._target = training.data.target
        if name == CROSS_ENTROPY:
            self._each: Each = lambda found, target: cross_entropy(found[outputs[0]], target)
        elif name == MSE:
            self._each = lambda found, target: squared_error(found[outputs[0]], target)
        else:
            function = training.load_symbol(name, "loss")
            self._each = lambda found, target: self._custom(function, found, target)

    def losses(
        self,
        outputs: Mapping[str, Tensor],
        micro: Micro,
        step: int,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return the loss of each sample; see :class:`compressor.passes.train.job.Objective`."""
        assert self._target is not None
        target = micro.tensors.get(self._target)
        if target is None:
            raise DataError(
                f"training data, target {self._target!r}",
                "is no array of numbers",
                "let the transform make it one",
            )
        try:
            return {"loss": self._each(outputs, target)}
        except ValueError as error:
            raise DataError(
                f"training data, target {self._target!r}",
                f"does not fit the outputs: {error}",
                "check the labels, or set loss",
            ) from error

    def _custom(
        self, function: Callable[..., Any], outputs: Mapping[str, Tensor], target: Tensor
    ) -> Tensor:
        """Call the user's function with the model's only output, or all of them by name."""
        own = {name: outputs[name] for name in self._outputs}
        given = next(iter(own.values())) if len(own) == 1 else own
        found = function(given, target)
        if not isinstance(found, torch.Tensor) or found.shape != (len(target),):
            shown = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise SpecError(
                f"loss {self._name!r}",
                f"returned {shown} for {len(target)} samples",
                "return a tensor with one entry a sample",
            )
        return found
