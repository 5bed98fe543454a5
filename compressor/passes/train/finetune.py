"""``finetune``: weights trained on with the loss of the task, which other passes use, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from compressor.calibration.sources.user_functions import call
from compressor.errors import DataError, SpecError, listed
from compressor.passes.train.engine import train_model
from compressor.passes.train.job import Micro
from compressor.passes.train.losses import cross_entropy, squared_error
from compressor.passes.train.recipe import Course, Recipe
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import Outcome, PassContext, Survey
from compressor.types.tensors import answers
from compressor.types.training import Training

Answers: TypeAlias = Tensor | dict[str, Tensor]

CROSS_ENTROPY, MSE = "cross-entropy", "mse"
_BY_METRIC = {
    "accuracy": CROSS_ENTROPY,
    "top5": CROSS_ENTROPY,
    "perplexity": CROSS_ENTROPY,
    "f1": CROSS_ENTROPY,
    "token-accuracy": CROSS_ENTROPY,
    "spearman": MSE,
    "mse": MSE,
    "cosine": MSE,
}


def loss_name(loss: str | None, metric: str | None) -> str:
    """Return the name of the loss, by the option or else by the metric.

    Raises:
        SpecError: the option names no loss, or is left out and the metric implies none.
    """
    if loss is not None:
        if loss not in (CROSS_ENTROPY, MSE) and ":" not in loss:
            raise SpecError(
                "loss", f"is {loss!r}", f"set {CROSS_ENTROPY}, {MSE} or package.module:function"
            )
        return loss
    implied = _BY_METRIC.get(metric or "")
    if implied is None:
        why = "there is no metric" if metric is None else f"metric {metric!r} does not imply one"
        raise SpecError("loss", f"is not given, and {why}", f"set loss, such as {CROSS_ENTROPY}")
    return implied


def check_smoothing(recipe: Recipe, name: str | None) -> None:
    """Raise ``SpecError`` if labels are to be smoothed for another loss than cross-entropy.

    Args:
        name: of the loss against labels; ``None`` if there is none.
    """
    if recipe.label_smoothing and name != CROSS_ENTROPY:
        loss = "no labels are trained on" if name is None else f"the loss is {name}"
        raise SpecError(
            "label-smoothing",
            f"is {recipe.label_smoothing:g}, and {loss}",
            "leave label-smoothing out" + ("" if name is None else f", or set {CROSS_ENTROPY}"),
        )


def task_loss(
    recipe: Recipe, carrier: Carrier, training: Training, context: PassContext
) -> TaskLoss:
    """Return the loss of a model's outputs against the target.

    Raises:
        SpecError: the recipe names no loss, and the metric implies none.
    """
    outputs = tuple(output.name for output in carrier.outputs)
    name = loss_name(recipe.loss, context.metric)
    return TaskLoss(name, outputs, training, recipe.label_smoothing)


class TaskLoss:
    """The loss, named as by :func:`loss_name`, of the first output against the target.

    A user's function gets all outputs.
    """

    def __init__(
        self, name: str, outputs: Sequence[str], training: Training, smoothing: float = 0.0
    ):
        self._smoothing = smoothing
        self._name = name
        self._outputs = tuple(outputs)
        self._target = training.data.target
        self._custom = training.load_symbol(name, "loss") if ":" in name else None

    def losses(self, outputs: Mapping[str, Tensor], micro: Micro, step: int) -> dict[str, Tensor]:
        """Return the loss of each sample; see :class:`Objective`."""
        assert self._target is not None
        target = answers(micro.tensors, self._target)
        if target is None:
            raise DataError(
                f"training data, target {self._target!r}",
                "is no array of numbers",
                "let the transform make it one",
            )
        if isinstance(target, dict) and self._custom is None:
            raise SpecError(
                f"loss {self._name!r}",
                f"takes one target, and the data have {listed(list(target))}",
                "set loss to a function of your own, which gets them as a dictionary",
            )
        mixed = micro.mixed
        try:
            loss = self._against(outputs, target)
            if mixed is not None and mixed.partners is not None:
                other = self._against(outputs, mixed.partners)
                loss = mixed.share * loss + (1 - mixed.share) * other
            return {"loss": loss}
        except ValueError as error:
            raise DataError(
                f"training data, target {self._target!r}",
                f"does not fit the outputs: {error}",
                "check the labels, or set loss",
            ) from error

    def _against(self, outputs: Mapping[str, Tensor], target: Answers) -> Tensor:
        """Return the loss of each sample against one of the targets that it has."""
        if self._custom is not None:
            return self._by_function(self._custom, outputs, target)
        assert isinstance(target, Tensor)
        first = outputs[self._outputs[0]]
        if self._name == CROSS_ENTROPY:
            return cross_entropy(first, target, self._smoothing)
        return squared_error(first, target)

    def _by_function(
        self, function: Callable[..., Any], outputs: Mapping[str, Tensor], target: Answers
    ) -> Tensor:
        """Call the user's function with the model's only output, or all of them by name."""
        by_name = {name: outputs[name] for name in self._outputs}
        single = len(by_name) == 1
        given = f"loss {self._name!r}" + ("" if single else f" of outputs {listed(self._outputs)}")
        loss = call(given, function, by_name[self._outputs[0]] if single else by_name, target)
        samples = len(next(iter(target.values()))) if isinstance(target, dict) else len(target)
        if not isinstance(loss, torch.Tensor) or loss.shape != (samples,):
            shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise SpecError(
                f"loss {self._name!r}",
                f"returned {shown} for {samples} samples",
                "return a tensor with one entry a sample",
            )
        return loss


class Finetune(Recipe):
    """Train the weights on, with the loss of the task.

    Weights that pruning made zero stay zero. The state is saved every `save-every` steps and at
    Ctrl-C; the same command resumes from there, and on one CPU ends in the same bytes as an
    uninterrupted training.
    """

    name: ClassVar[str] = "finetune"
    version: ClassVar[int] = 7
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.TRAIN, Capability.GRAPH})
    labelled: ClassVar[bool] = True
    source: ClassVar[str] = (
        "gradual pruning: Zhu and Gupta 2017 (arXiv:1710.01878); rewinding: Frankle et al. 2020 "
        "(arXiv:1912.05671)"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Return which layers are trained; check the loss."""
        name = loss_name(self.loss, context.metric)
        check_smoothing(self, name)
        note = f"trained with {name} as loss"
        return Survey(self.plan(carrier), notes=(note, *self.pruned_notes(context)))

    def train_on(self, carrier: Carrier, context: PassContext, course: Course) -> Outcome:
        """Train with the loss of the task."""
        module = carrier.trainable()
        self.freeze(carrier, module)
        loss = task_loss(self, carrier, course.training, context)
        trained = train_model(course, carrier, module, loss)
        return self.outcome(carrier, trained, course.training.metric)
