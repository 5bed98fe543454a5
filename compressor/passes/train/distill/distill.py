"""``distill``: a student learns from a teacher, or from assistants between the two in size.

S. Mirzadeh et al., Improved knowledge distillation via teacher assistant, 2020 (arXiv:1902.03393),
section 3: a teacher that is far larger than its student teaches worse than one in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from compressor.errors import SpecError
from compressor.files import json_text
from compressor.passes.train.distill.distilling import (
    Distillation,
    distilled_loss,
    model_keys,
    opened_teacher,
)
from compressor.passes.train.distill.taps import LayerPair, Pairs, check_layer, make_student
from compressor.passes.train.engine import train_model
from compressor.passes.train.finetune import check_smoothing, loss_name
from compressor.passes.train.kept_parts import kept_part
from compressor.passes.train.recipe import Course, Recipe
from compressor.spec.keys import ModelKeys
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import Outcome, PassContext, Survey
from compressor.types.training import Training


class AssistantKeys(ModelKeys):
    """A model of a size between teacher and student."""

    epochs: float = Field(
        default=1.0,
        ge=0,
        description="epochs of learning from the one before; 0 if it is trained already",
    )

    @model_validator(mode="after")
    def _trainable(self) -> AssistantKeys:
        if self.epochs and self.factory is None:
            raise ValueError("only a factory's module is trained; set factory, or epochs: 0")
        return self


_MODEL, _NOTES = "model", "notes.json"


def _write(outcome: Outcome, folder: Path) -> None:
    """Write a taught assistant."""
    (folder / _MODEL).mkdir()
    outcome.carrier.save(folder / _MODEL)
    (folder / _NOTES).write_text(json_text(list(outcome.notes)), encoding="utf-8")


class Distill(Recipe, Distillation):
    """Train the weights on, with a teacher's outputs beside or in place of the target.

    The teacher is the spec's own model as it was before the first pass, or another one. The
    student's outputs, and those of the layers that are named, are trained towards the teacher's.
    Assistants, models of sizes in between, may be taught first, each by the one before.
    """

    name: ClassVar[str] = "distill"
    version: ClassVar[int] = 8
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.TRAIN, Capability.GRAPH})
    source: ClassVar[str] = (
        "Hinton et al. 2015 (arXiv:1503.02531); features: Romero et al. 2015 (arXiv:1412.6550); "
        "attention: Zagoruyko and Komodakis 2017 (arXiv:1612.03928); assistants: Mirzadeh et al. "
        "2020 (arXiv:1902.03393)"
    )

    features: tuple[LayerPair, ...] = Field(
        default=(),
        description="layers whose outputs are trained towards those of the teacher's layers, "
        "through a trained projection if widths differ",
    )
    attention: tuple[LayerPair, ...] = Field(
        default=(),
        description="layers whose attention maps, which show where they are active, are trained "
        "towards those of the teacher's layers",
    )
    assistants: tuple[AssistantKeys, ...] = Field(
        default=(),
        description="models from large to small, keys as under model: the teacher teaches the "
        "first, each the next, and the last the student",
    )

    @property
    def pairs(self) -> Pairs:
        """The layers that are compared."""
        return Pairs(self.features, self.attention)

    @property
    def other_models(self) -> Mapping[str, Mapping[str, Any]]:
        """The teacher, if it is not the spec's model, and the assistants."""
        assistants = {f"assistants.{i}": model_keys(k) for i, k in enumerate(self.assistants)}
        return {**self.named_models, **assistants}

    def check_models(self, carrier: Carrier, others: Mapping[str, Carrier]) -> None:
        """Compare outputs and layers of teachers with the student's."""
        for other in others.values():
            self.check_teacher(carrier, other)
        last = f"assistants.{len(self.assistants) - 1}" if self.assistants else "teacher"
        if last in others:
            self._check_layers(others[last], "teacher")

    def _check_layers(self, carrier: Carrier, side: str) -> None:
        for option, pairs in (("features", self.features), ("attention", self.attention)):
            for index, pair in enumerate(pairs):
                name = pair.student if side == "student" else pair.teacher
                check_layer(name, carrier, f"{option}.{index}.{side}")

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target: where a part of the loss is the task's."""
        return self.alpha > 0

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Return which layers are trained; check the losses and the student's layers."""
        hard = loss_name(self.loss, context.metric) if self.labelled else None
        check_smoothing(self, hard)
        soft = self.soft_loss(self.loss, context.metric, carrier.outputs)
        adapts = self.planned_notes(carrier, context.source)
        self._check_layers(carrier, "student")
        name = (
            f"the divergence from the teacher's probabilities at temperature {self.temperature:g}"
        )
        if soft == "mse":
            name = "the squared difference to the teacher's outputs"
        target = f", {self.alpha:g} {hard}" if hard else ""
        share = f"{1 - self.alpha:g} of the loss" if self.alpha else "the loss"
        note = f"{share} is {name}{target}"
        return Survey(self.plan(carrier), notes=(note, *adapts, *self.pruned_notes(context)))

    def train_on(self, carrier: Carrier, context: PassContext, course: Course) -> Outcome:
        """Train assistants, then the model."""
        training = course.training
        self._check_layers(carrier, "student")
        teacher = opened_teacher(self, training)
        notes: list[str] = []
        for index, keys in enumerate(self.assistants):
            option = f"assistants.{index}"
            assistant = training.open_model(model_keys(keys), option)
            if keys.epochs:
                if Capability.TRAIN not in assistant.offers:
                    raise SpecError(option, "cannot be trained", "give a factory, or set epochs: 0")
                assistant, remarks = self._assistant(index, assistant, teacher, context, training)
                notes += [f"{option}: {note}" for note in remarks]
            teacher = assistant
        self._check_layers(teacher, "teacher")
        result = self._taught(carrier, teacher, context, course)
        return replace(result, notes=(*notes, *result.notes))

    def _assistant(
        self,
        index: int,
        assistant: Carrier,
        teacher: Carrier,
        context: PassContext,
        training: Training,
    ) -> tuple[Carrier, list[str]]:
        """Teach an assistant, in a folder of its own; one taught by an earlier run is kept."""

        def taught(inner: Training) -> Outcome:
            options = self._for_assistant(index)
            inner = replace(inner, label=f"{training.label or self.name}, assistant {index}")
            course = options.course(inner, assistant.inputs, context.seed)
            return options._taught(assistant, teacher, context, course)

        done = kept_part(training, f"assistant-{index}", f"assistant {index}", taught, _write)
        notes: list[str] = json.loads((done / _NOTES).read_text(encoding="utf-8"))
        return assistant.restore(done / _MODEL), notes

    def _for_assistant(self, index: int) -> Distill:
        """Return the options an assistant is taught with: all but those that name layers."""
        length = {"epochs": self.assistants[index].epochs, "steps": None, "prune": None}
        alpha = self.alpha if self.alpha < 1 else type(self).model_fields["alpha"].default
        bare = dict.fromkeys(("features", "attention", "layers", "assistants"), ())
        return self.model_copy(update={**length, **bare, "alpha": alpha})

    def _taught(
        self, carrier: Carrier, teacher: Carrier, context: PassContext, course: Course
    ) -> Outcome:
        module = make_student(carrier, self.pairs, course.training.samples)
        self.freeze(carrier, module)
        loss = distilled_loss(self, teacher, carrier, module, course, context)
        trained = train_model(course, carrier, module, loss)
        result = self.outcome(carrier, trained, course.training.metric)
        parts = ", ".join(f"{name} {value:.4g}" for name, value in sorted(trained.terms.items()))
        notes = (*result.notes, f"loss at the last step: {parts}", *loss.teacher.notes())
        return replace(result, notes=notes)
