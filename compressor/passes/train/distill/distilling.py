"""Learning from a teacher: what a student's outputs and layers are compared with, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import SpecError, suggestion
from compressor.passes.train.distill.options import Distillation, Soft, model_keys
from compressor.passes.train.distill.students import (
    ATTENTION,
    FEATURE,
    Pairs,
    Student,
    attention_axis,
    fit_widths,
    tap_name,
)
from compressor.passes.train.distill.teacher_outputs import Course, TeacherOutputs, fields_of
from compressor.passes.train.distill.teachers import Taps, Teacher
from compressor.passes.train.engine import length, make_order
from compressor.passes.train.finetune import task_loss
from compressor.passes.train.job import Micro, Objective, as_tensors
from compressor.passes.train.losses import (
    NOT_COUNTED,
    attention_difference,
    attention_map,
    kl_divergence,
    mean_square,
)
from compressor.passes.train.recipe import Recipe
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.tensors import TensorSpec
from compressor.types.training import Training

_PROBED = 2  # samples that shapes are found with


@dataclass(frozen=True)
class Pupil:
    """What is taught.

    Attributes:
        carrier: the model.
        module: what is trained; it takes the model's inputs and returns its outputs by name.
        pairs: layers that are compared, too; the module is then a
            :class:`compressor.passes.train.distill.students.Student`.
    """

    carrier: Carrier
    module: nn.Module
    pairs: Pairs = field(default_factory=Pairs)


@dataclass(frozen=True)
class LossTerms:
    """What the loss is made of.

    Attributes:
        options: the weights.
        soft: how outputs are compared.
        hard: the loss against the target, where there is one.
    """

    options: Distillation
    soft: Soft
    hard: Objective | None = None


class DistilledLoss:
    """``alpha`` times the loss against the target, and the rest of it against the teacher.

    An :class:`compressor.passes.train.job.Objective`; made by :func:`teach`.

    Args:
        terms: what is added up.
        pupil: the student.
        compared: names of the outputs that are compared.
        attention: axes that attention maps are summed over, by tap.
        outputs: the teacher's.
        target: name of the labels, if there are any.
    """

    def __init__(
        self,
        terms: LossTerms,
        pupil: Pupil,
        compared: Sequence[str],
        attention: Mapping[str, int],
        outputs: TeacherOutputs,
        target: str | None,
    ):
        self._terms = terms
        self._inputs = tuple(spec.name for spec in pupil.carrier.inputs)
        self._pairs = pupil.pairs
        self._compared = tuple(compared)
        self._attention = dict(attention)
        self._outputs = outputs
        self._target = target

    def losses(self, outputs: Mapping[str, Tensor], micro: Micro, step: int) -> dict[str, Tensor]:
        """Return the terms for each sample; see :class:`compressor.passes.train.job.Objective`."""
        options = self._terms.options
        inputs = {name: micro.tensors[name] for name in self._inputs}
        theirs = self._outputs.of(micro, inputs, step)
        found: dict[str, Tensor] = {}
        if self._terms.hard is not None:
            hard = self._terms.hard.losses(outputs, micro, step)
            found["hard"] = options.alpha * sum_of(list(hard.values()))
        if options.alpha < 1:
            each = [self._soft(outputs[name], theirs[name], micro) for name in self._compared]
            found["soft"] = (1 - options.alpha) * sum_of(each)
        features = [
            pair.weight * mean_square(outputs[tap], theirs[tap])
            for index, pair in enumerate(self._pairs.features)
            for tap in [tap_name(FEATURE, index)]
        ]
        attention = [
            pair.weight
            * attention_difference(attention_map(outputs[tap], self._attention[tap]), theirs[tap])
            for index, pair in enumerate(self._pairs.attention)
            for tap in [tap_name(ATTENTION, index)]
        ]
        found |= {"features": sum_of(features)} if features else {}
        found |= {"attention": sum_of(attention)} if attention else {}
        return found

    def notes(self) -> tuple[str, ...]:
        """Say where the teacher's outputs came from."""
        return self._outputs.notes()

    def _soft(self, ours: Tensor, theirs: Tensor, micro: Micro) -> Tensor:
        if self._terms.soft == "mse":
            return mean_square(ours, theirs)
        labels = micro.tensors.get(self._target) if self._target is not None else None
        counted = None
        if labels is not None and labels.numel() == ours[..., 0].numel():
            counted = labels != NOT_COUNTED
        return kl_divergence(ours, theirs, self._terms.options.temperature, counted)


def distilled_loss(
    recipe: Recipe,
    options: Distillation,
    teacher: Carrier,
    pupil: Pupil,
    training: Training,
    context: PassContext,
) -> DistilledLoss:
    """Return the loss of a pass whose model learns from a teacher.

    Args:
        recipe: how the pass trains.
        options: how it learns; may be the recipe itself.
        teacher: as :func:`opened_teacher` returns it.
        pupil: the model, and the module that is trained.
        training: data and the folder of the cache.
        context: has the seed and the metric.

    Raises:
        SpecError: outputs or layers do not fit together.
        CompressorError: data cannot be read, or the teacher does not run.
    """
    hard = task_loss(recipe, pupil.carrier, training, context) if options.alpha > 0 else None
    terms = LossTerms(options, options.soft_loss(recipe.loss, context.metric), hard)
    order = make_order(recipe, training, pupil.carrier.inputs, context.seed)
    micro, steps = recipe.micro_batch or order.batch, length(recipe, order)
    course = Course(training, order, micro, steps, options.cache)
    return teach(terms, teacher, pupil, course, context.seed)


def opened_teacher(options: Distillation, training: Training, where: str = "teacher") -> Carrier:
    """Return the model that an option names as teacher, or else the one before the first pass.

    Args:
        options: may name it.
        training: opens it.
        where: the option.

    Raises:
        CompressorError: it cannot be opened.
    """
    if options.teacher is None:
        return training.source
    return training.open_model(model_keys(options.teacher), where)


def sum_of(each: Sequence[Tensor]) -> Tensor:
    """Add up tensors of one shape."""
    return torch.stack(list(each)).sum(dim=0)


def teach(
    terms: LossTerms, teacher: Carrier, pupil: Pupil, course: Course, seed: int
) -> DistilledLoss:
    """Return the loss of a student that learns from a teacher.

    Both are run on a few samples, to compare what they give; then what can be is computed ahead.
    Where the student's layers have other widths, its module gets projections.

    Args:
        terms: what the loss is made of.
        teacher: the model to learn from.
        pupil: the student.
        course: the training.
        seed: of the projections' first weights.

    Raises:
        SpecError: outputs or layers do not fit together.
        CompressorError: data cannot be read, or the teacher does not run.
    """
    sources = matched_outputs(pupil.carrier.outputs, teacher.outputs, terms.options.outputs)
    layers = pupil.pairs.teacher_layers
    taps = Taps(tuple(sources.values()), layers, f"{pupil.pairs.where}.teacher")
    taught = Teacher(teacher, taps, pupil.carrier.inputs)
    given = _probe(pupil.carrier, course)
    ours, theirs = _outputs(pupil.module, given), taught(given)
    for name, source in sources.items():
        _check_pair(name, ours[name], theirs[source], terms.soft)
    pairs = pupil.pairs.by_tap
    axes = {
        tap: attention_axis(pair, pupil.carrier, ours[tap], theirs[pair.teacher])
        for tap, pair in pairs.items()
        if tap.startswith(ATTENTION)
    }
    if pairs:
        assert isinstance(pupil.module, Student)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fit_widths(pupil.module, pupil.pairs, ours, theirs)

    def compute(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = taught(inputs)
        result = {name: found[source] for name, source in sources.items()}
        for tap, pair in pairs.items():
            value = found[pair.teacher]
            result[tap] = attention_map(value, axes[tap]) if tap in axes else value
        return result

    identity: dict[str, Any] = {**taught.identity, "outputs": sources, "axes": axes}
    identity["layers"] = {tap: pair.teacher for tap, pair in pairs.items()}
    outputs = TeacherOutputs(compute, identity, fields_of(compute(given)), course)
    outputs.prepare([spec.name for spec in pupil.carrier.inputs])
    target = course.training.data.target
    return DistilledLoss(terms, pupil, list(sources), axes, outputs, target)


def _probe(carrier: Carrier, course: Course) -> dict[str, Tensor]:
    """Return the inputs of a few samples."""
    count = course.micro if course.order.whole else _PROBED
    rows = course.order.trained[:count]
    batch = course.training.data.batch(rows, (course.order.seed, 0, 0))
    tensors = as_tensors(batch, len(rows))
    return {spec.name: tensors[spec.name] for spec in carrier.inputs}


@torch.no_grad()
def _outputs(module: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = module.eval()(**given)
    return found


def matched_outputs(
    ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec], wanted: Sequence[str] | None
) -> dict[str, str]:
    """Return the teacher's output for each of the student's that is compared.

    They go by name where the teacher has all of the names, else by order.

    Args:
        ours: the student's outputs.
        theirs: the teacher's.
        wanted: names of the student's that are compared; all that are floats if ``None``.

    Raises:
        SpecError: there is no such output, the teacher has another number of them, or shapes
            that are known differ.
    """
    names = [spec.name for spec in ours]
    for name in wanted or ():
        if name not in names:
            raise SpecError("outputs", f"names {name!r}", suggestion(name, names))
    chosen = [s for s in ours if (s.name in wanted if wanted else s.dtype.startswith("float"))]
    by_name = {spec.name: spec for spec in theirs}
    if not all(spec.name in by_name for spec in chosen):
        if len(theirs) != len(ours):
            raise _other_outputs(", ".join(map(str, ours)), ", ".join(map(str, theirs)))
        by_name = {own.name: spec for own, spec in zip(ours, theirs, strict=True)}
    for spec in chosen:
        other = by_name[spec.name]
        known = [
            (a, b)
            for a, b in zip(spec.shape, other.shape, strict=False)
            if isinstance(a, int) and isinstance(b, int)
        ]
        if len(spec.shape) != len(other.shape) or any(a != b for a, b in known):
            raise _other_outputs(str(spec), str(other))
    return {spec.name: by_name[spec.name].name for spec in chosen}


def _check_pair(name: str, ours: Tensor, theirs: Tensor, soft: Soft) -> None:
    if ours.shape != theirs.shape:
        raise _other_outputs(f"{name} {list(ours.shape)}", f"{list(theirs.shape)}")
    if soft == "kl" and (ours.ndim < 2 or ours.shape[-1] < 2):
        raise SpecError(
            "soft",
            f"is kl, and output {name!r} of shape {list(ours.shape)} is no logits of classes",
            "set soft: mse",
        )


def _other_outputs(ours: str, theirs: str) -> SpecError:
    return SpecError(
        "teacher",
        f"gives {theirs}, the student {ours}",
        "name a teacher for the same task, or the outputs to compare",
    )
