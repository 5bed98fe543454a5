"""Learning from a teacher: what a student's outputs and layers are compared with, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from compressor.errors import SpecError, suggestion
from compressor.passes.train.distill.adaptation import adaptable, adapted
from compressor.passes.train.distill.taps import (
    ATTENTION,
    Pairs,
    Student,
    attention_axis,
    fit_widths,
)
from compressor.passes.train.distill.teacher_outputs import TeacherOutputs, fields_of
from compressor.passes.train.distill.teachers import Teacher
from compressor.passes.train.finetune import MSE, task_loss
from compressor.passes.train.job import Micro, Objective, as_tensors
from compressor.passes.train.losses import (
    NOT_COUNTED,
    attention_difference,
    attention_map,
    by_class,
    kl_divergence,
    mean_square,
)
from compressor.passes.train.recipe import Course
from compressor.run.metrics.scores import class_axis, known_sizes
from compressor.spec.keys import ModelKeys
from compressor.types.carrier import Carrier
from compressor.types.options import Options
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from compressor.types.training import Training

Soft: TypeAlias = Literal["kl", "mse"]

_PROBED = 2  # samples that shapes are found with
_BY_DISTANCE = (MSE, "cosine")  # metrics of outputs that are not logits


class Distillation(Options):
    """Learning from a teacher's outputs."""

    alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="weight of the loss against the target; the loss against the teacher has the "
        "rest, and with 0 the training data need no target",
    )
    temperature: float = Field(
        default=4.0, gt=0, description="divisor of logits before they are compared"
    )
    soft: Soft | None = Field(
        default=None,
        description="how outputs are compared with the teacher's: kl as logits, mse as numbers; "
        "default: by the loss or metric, and mse where an output cannot hold logits",
    )
    outputs: tuple[str, ...] | None = Field(
        default=None, description="names of the outputs to compare; default: all"
    )
    teacher: ModelKeys | None = Field(
        default=None,
        description="keys as under model: factory, checkpoint and config, or onnx; default: the "
        "spec's own model before the first pass",
    )
    adapt_teacher: bool | None = Field(
        default=None,
        description="re-estimate the teacher's batch-norm statistics on the training data; "
        "default: if that lowers its loss against the target beyond chance",
    )
    cache: bool | None = Field(
        default=None,
        description="keep the teacher's outputs on disk for further epochs and runs; default: if "
        "they take at most 1 GiB",
    )

    @model_validator(mode="after")
    def _learns_from_the_teacher(self) -> Distillation:
        if self.alpha == 1 and not self.pairs.by_tap:
            raise ValueError(
                "alpha is 1 and no layers are paired, so nothing is learnt from the teacher; "
                "lower alpha, or leave the teacher out"
            )
        return self

    @property
    def pairs(self) -> Pairs:
        """The layers that are compared."""
        return Pairs()

    @property
    def named_models(self) -> dict[str, Mapping[str, Any]]:
        """Models that these options name, by option; see ``Pass.other_models``."""
        return {} if self.teacher is None else {"teacher": model_keys(self.teacher)}

    def check_teacher(self, carrier: Carrier, teacher: Carrier) -> None:
        """Compare a teacher that the options name with the student.

        Raises:
            SpecError: outputs do not fit, or it cannot be adapted as asked.
        """
        matched_outputs(carrier.outputs, teacher.outputs, self.outputs)
        if self.adapt_teacher:
            adaptable(True, teacher)

    def planned_notes(self, carrier: Carrier, unnamed: Carrier | None) -> tuple[str, ...]:
        """Return what will be done to the teacher, for plans.

        Args:
            carrier: the student.
            unnamed: what teaches where the options name no teacher; ``None`` if it is not known.

        Raises:
            SpecError: there is no such output, or ``unnamed`` cannot be adapted as asked.
        """
        compared = matched_outputs(carrier.outputs, carrier.outputs, self.outputs)
        judged = self.alpha > 0 and len(compared) == len(carrier.outputs)
        if self.adapt_teacher is False or (self.adapt_teacher is None and not judged):
            return ()
        known = unnamed if self.teacher is None else None
        if known is not None and not adaptable(self.adapt_teacher, known):
            return ()
        note = "the teacher's batch-norm statistics are re-estimated on the training data"
        if self.adapt_teacher is None:
            note += (
                " if its loss against the target falls by that (adapt-teacher: false keeps them)"
            )
        return (note,)

    def soft_loss(
        self, loss: str | None, metric: str | None, outputs: Sequence[TensorSpec]
    ) -> Soft:
        """Return how outputs are compared with the teacher's.

        Args:
            outputs: the student's.

        Raises:
            SpecError: they are to be compared as logits, and one cannot hold them.
        """
        distance = loss == MSE or (loss is None and metric in _BY_DISTANCE)
        if self.soft == "mse" or (self.soft is None and distance):
            return "mse"
        names = matched_outputs(outputs, outputs, self.outputs)
        compared = [spec for spec in outputs if spec.name in names]
        for spec in compared:
            if not _may_hold_logits(spec.shape):
                if self.soft is None:
                    return "mse"
                raise _no_logits(spec.name, spec.shape, alone=len(compared) == 1)
        return "kl"


def model_keys(keys: ModelKeys) -> dict[str, Any]:
    """Return a model's keys as written in a spec, without those that only an assistant has."""
    fields = set(ModelKeys.model_fields)
    return keys.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=fields)


@dataclass(frozen=True)
class DistilledLoss:
    """``alpha`` times the loss against the target, the rest against the teacher.

    An :class:`Objective`, made by :func:`distilled_loss`. Inputs are the student's; attention maps
    are summed over ``axes``, by tap.
    """

    options: Distillation
    soft: Soft
    hard: Objective | None
    inputs: Sequence[str]
    compared: Sequence[str]
    axes: Mapping[str, int]
    teacher: TeacherOutputs
    target: str | None

    def losses(self, outputs: Mapping[str, Tensor], micro: Micro, step: int) -> dict[str, Tensor]:
        """Return the terms for each sample; see :class:`Objective`."""
        alpha = self.options.alpha
        inputs = {name: micro.tensors[name] for name in self.inputs}
        theirs = self.teacher.of(micro, inputs, step)
        terms: dict[str, Tensor] = {}
        if self.hard is not None:
            hard = self.hard.losses(outputs, micro, step)
            terms["hard"] = alpha * _sum(list(hard.values()))
        if alpha < 1:
            each = [self._soft(outputs[name], theirs[name], micro) for name in self.compared]
            terms["soft"] = (1 - alpha) * _sum(each)
        features, attention = [], []
        for tap, pair in self.options.pairs.by_tap.items():
            if tap in self.axes:
                ours = attention_map(outputs[tap], self.axes[tap])
                attention.append(pair.weight * attention_difference(ours, theirs[tap]))
            else:
                features.append(pair.weight * mean_square(outputs[tap], theirs[tap]))
        terms |= {"features": _sum(features)} if features else {}
        terms |= {"attention": _sum(attention)} if attention else {}
        return terms

    def _soft(self, student: Tensor, teacher: Tensor, micro: Micro) -> Tensor:
        if self.soft == "mse":
            return mean_square(student, teacher)
        labels = None if self.target is None else micro.tensors.get(self.target)
        counted = None
        if labels is not None and labels.numel() == len(by_class(student)):
            counted = labels != NOT_COUNTED
        return kl_divergence(student, teacher, self.options.temperature, counted)


def distilled_loss(
    options: Distillation,
    teacher: Carrier,
    student: Carrier,
    module: nn.Module,
    course: Course,
    context: PassContext,
) -> DistilledLoss:
    """Return the loss of a pass whose model learns from a teacher.

    The teacher is adapted to the training data if it then teaches better. Both are run on a few
    samples to compare the shapes of their outputs; then those outputs of the teacher that are the
    same in every epoch are computed. Where the student's layers have other widths than the
    teacher's, ``module``, which is trained, gets projections.

    Raises:
        SpecError: outputs or layers do not fit together.
        CompressorError: data cannot be read, or the teacher does not run.
    """
    recipe, training, order = course.recipe, course.training, course.order
    hard = task_loss(recipe, student, training, context) if options.alpha > 0 else None
    soft = options.soft_loss(recipe.loss, context.metric, student.outputs)
    sources = matched_outputs(student.outputs, teacher.outputs, options.outputs)
    judge = hard if len(sources) == len(student.outputs) else None
    teacher, remark = adapted(
        options.adapt_teacher, teacher, student.inputs, sources, judge, course
    )
    layers, where = options.pairs.teacher_layers, f"{options.pairs.where}.teacher"
    taught = Teacher(teacher, student.inputs, list(sources.values()), layers, where)
    inputs = [spec.name for spec in student.inputs]
    rows = order.trained[: course.micro if order.whole else _PROBED]
    tensors = as_tensors(training.data.batch(rows, (order.seed, 0, 0)), len(rows))
    probe = {name: tensors[name] for name in inputs}
    theirs = taught(probe)
    with torch.no_grad():
        ours: dict[str, Tensor] = module.eval()(**probe)
    for name, source in sources.items():
        _check_pair(name, ours[name], theirs[source], soft, alone=len(sources) == 1)
    pairs = options.pairs.by_tap
    axes = {
        tap: attention_axis(pair, student, ours[tap], theirs[pair.teacher])
        for tap, pair in pairs.items()
        if tap.startswith(ATTENTION)
    }
    if isinstance(module, Student):
        fit_widths(module, options.pairs, ours, theirs, order.seed)

    def compute(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = taught(inputs)
        result = {name: outputs[source] for name, source in sources.items()}
        for tap, pair in pairs.items():
            value = outputs[pair.teacher]
            result[tap] = attention_map(value, axes[tap]) if tap in axes else value
        return result

    identity: dict[str, Any] = {**taught.identity, "outputs": sources, "axes": axes}
    identity["layers"] = {tap: pair.teacher for tap, pair in pairs.items()}
    kept = TeacherOutputs(
        compute, identity, fields_of(compute(probe)), course, options.cache, remark
    )
    kept.prepare(inputs)
    target = training.data.target
    return DistilledLoss(options, soft, hard, inputs, list(sources), axes, kept, target)


def opened_teacher(options: Distillation, training: Training, where: str = "teacher") -> Carrier:
    """Return the model that option ``where`` names as teacher, or the one before the first pass.

    Raises:
        CompressorError: it cannot be opened.
    """
    if options.teacher is None:
        return training.source
    return training.open_model(model_keys(options.teacher), where)


def _sum(each: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(each)).sum(dim=0)


def matched_outputs(
    student: Sequence[TensorSpec], teacher: Sequence[TensorSpec], names: Sequence[str] | None
) -> dict[str, str]:
    """Return the teacher's output for each of the student's that is compared.

    They are matched by name if the teacher has all of the names, else by order. Without ``names``,
    all of the student's outputs that are floats are compared.

    Raises:
        SpecError: there is no such output, the teacher has another number of them, or known
            shapes differ.
    """
    available = [spec.name for spec in student]
    for name in names or ():
        if name not in available:
            raise SpecError("outputs", f"names {name!r}", suggestion(name, available))
    compared = [s for s in student if (s.name in names if names else "float" in s.dtype)]
    by_name = {spec.name: spec for spec in teacher}
    if not all(spec.name in by_name for spec in compared):
        if len(teacher) != len(student):
            raise _other_outputs(", ".join(map(str, student)), ", ".join(map(str, teacher)))
        by_name = {mine.name: spec for mine, spec in zip(student, teacher, strict=True)}
    for spec in compared:
        other = by_name[spec.name]
        differs = any(
            isinstance(a, int) and isinstance(b, int) and a != b
            for a, b in zip(spec.shape, other.shape, strict=False)
        )
        if len(spec.shape) != len(other.shape) or differs:
            raise _other_outputs(str(spec), str(other))
    return {spec.name: by_name[spec.name].name for spec in compared}


def _check_pair(name: str, student: Tensor, teacher: Tensor, soft: Soft, *, alone: bool) -> None:
    if student.shape != teacher.shape:
        raise _other_outputs(f"{name} {list(student.shape)}", f"{list(teacher.shape)}")
    if soft == "kl" and not _may_hold_logits(student.shape):
        raise _no_logits(name, student.shape, alone=alone)


def _may_hold_logits(shape: Sequence[int | str | None]) -> bool:
    """Whether an output has an axis of classes beside that of samples, as far as is known."""
    sizes = known_sizes(shape)
    return len(sizes) > 1 and sizes[class_axis(sizes)] > 1


def _no_logits(name: str, shape: Sequence[int | str | None], *, alone: bool) -> SpecError:
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return SpecError(
        "soft",
        f"is kl, but output {name!r} of shape [{sizes}] does not hold logits",
        "set soft: mse"
        if alone
        else "name those that do in outputs (the others drift), or set soft: mse",
    )


def _other_outputs(student: str, teacher: str) -> SpecError:
    return SpecError(
        "teacher",
        f"returns {teacher}, but the student returns {student}",
        "name a teacher for the same task, or the outputs to compare",
    )
