"""Losses, one value a sample, so that averages over batches of any size are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from compressor.errors import DataError, SpecError
from compressor.passes.train.engine import length, make_order, train
from compressor.passes.train.job import Job, Objective
from compressor.passes.train.preparing import freeze, outcome, plan_training, regulators
from compressor.passes.train.recipe import Recipe
from compressor.passes.train.steps import Micro
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import Outcome, PassContext, Survey
from compressor.types.training import Training

NOT_COUNTED = -100
"""Label of a position that does not count, as is the custom for padding."""


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return each sample's mean negative log-likelihood.

    Args:
        logits: ``[N, ..., classes]``.
        target: labels, as many as there are rows of logits; -100 does not count.

    Returns:
        ``[N]``, in nats, float32 at least; 0 for a sample without labels that count.

    Raises:
        ValueError: a label is none of the classes.
    """
    classes = logits.shape[-1]
    rows = logits.reshape(-1, classes)
    truth = target.reshape(-1).to(torch.int64)
    if len(truth) != len(rows):
        raise ValueError(f"{len(truth)} labels for {len(rows)} rows of logits")
    counted = truth != NOT_COUNTED
    check_labels(truth[counted], classes)
    each = functional.cross_entropy(
        rows.float() if rows.dtype.itemsize < 4 else rows,
        truth,
        ignore_index=NOT_COUNTED,
        reduction="none",
    )
    return masked_mean(each, counted, len(logits))


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are none of the classes.

    Raises:
        ValueError: one is not.
    """
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"labels {int(labels.min())} to {int(labels.max())} for {classes} classes")


def masked_mean(each: Tensor, counted: Tensor, samples: int) -> Tensor:
    """Average what counts of each sample.

    Args:
        each: one value a position, ``[N * positions]``.
        counted: which of them count, likewise.
        samples: ``N``.

    Returns:
        ``[N]``; 0 where nothing counts.
    """
    known = counted.to(each.dtype).reshape(samples, -1)
    total = (each.reshape(samples, -1) * known).sum(dim=1)
    return total / known.sum(dim=1).clamp(min=1)


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return each sample's mean squared error, ``[N]``.

    Raises:
        ValueError: the shapes differ.
    """
    if outputs.shape != target.shape and outputs.numel() != target.numel():
        raise ValueError(f"targets {list(target.shape)} for outputs {list(outputs.shape)}")
    wanted = target.reshape(outputs.shape).to(outputs.dtype)
    return (outputs - wanted).square().reshape(len(outputs), -1).mean(dim=1)


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


class Finetune(Recipe):
    """Train the weights on, with the loss of the task.

    What pruning made zero stays zero. The state is saved every so many steps and at Ctrl-C; the
    same command goes on from there, and on one CPU ends in the same bytes as if it had never
    stopped.
    """

    name: ClassVar[str] = "finetune"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.TRAIN, Capability.GRAPH})
    source: ClassVar[str] = (
        "gradual pruning: Zhu and Gupta 2017 (arXiv:1710.01878); rewinding: Frankle et al. 2020 "
        "(arXiv:1912.05671)"
    )

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target: always."""
        return True

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Return which layers are trained; check the loss."""
        name = loss_name(self.loss, context.metric)
        notes = (f"trained with {name} as loss",)
        return Survey(plan_training(self, carrier), notes=notes)

    def apply_training(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
        training: Training,
    ) -> Outcome:
        """Train.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`.
        """
        order = make_order(self, training, carrier.inputs, context.seed)
        module = carrier.trainable()
        freeze(self, carrier, module)
        outputs = tuple(output.name for output in carrier.outputs)
        loss = TaskLoss(loss_name(self.loss, context.metric), outputs, training)
        job = Job(
            name=self.name,
            module=module,
            objective=loss,
            inputs=tuple(i.name for i in carrier.inputs),
            outputs=outputs,
            regulators=regulators(self, carrier, module, length(self, order)),
        )
        return outcome(self, carrier, train(job, self, training, order), training.metric)

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Return the model as it is: training changes no shape."""
        return carrier


def make_objective(
    recipe: Recipe, carrier: Carrier, training: Training, context: PassContext
) -> Objective:
    """Return the loss that a recipe asks for.

    Args:
        recipe: the pass's options.
        carrier: the model that is trained.
        training: data.
        context: has the metric.

    Raises:
        SpecError: no loss is given, and the metric does not tell.
    """
    return task_loss(recipe, tuple(o.name for o in carrier.outputs), training, context)
