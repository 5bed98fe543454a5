"""What passes that train share: their options, what is trained, and what comes out of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from compressor.errors import DataError, SpecError
from compressor.graph.sparse_kernels import sparse_notes
from compressor.passes.prune.magnitude.magnitude import choose_layers
from compressor.passes.train.accelerators import check_precision
from compressor.passes.train.job import PREFIX, Order, Regulator, Trained
from compressor.passes.train.logs import Log
from compressor.passes.train.mixup import Mixup, mixup_of
from compressor.passes.train.pruning import Gradual, GradualPruning, Parts, ZerosKept
from compressor.passes.train.rates import MILESTONES, Schedule
from compressor.types.carrier import Carrier
from compressor.types.layer_rules import plan_layers, skip_reasons
from compressor.types.layers import Layer
from compressor.types.passes import (
    LayerOutcome,
    LayerPlan,
    LayerRule,
    Outcome,
    PassContext,
    TrainPass,
)
from compressor.types.tensors import TensorSpec
from compressor.types.training import Measure, Training


@dataclass(frozen=True)
class Course:
    """What a training goes through: how it trains, on what, and which samples each step has."""

    recipe: Recipe
    training: Training
    order: Order
    mixup: Mixup | None = None

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.recipe.steps or max(1, round(self.recipe.epochs * self.order.steps_in_epoch))

    @property
    def parts(self) -> Parts:
        """How pruning in rounds divides them."""
        prune = self.recipe.prune
        return Parts(self.steps) if prune is None else prune.parts(self.steps)

    @property
    def prunings(self) -> tuple[int, ...]:
        """The steps after which a round of pruning ends."""
        prune = self.recipe.prune
        return () if prune is None else prune.ends(self.steps)

    @property
    def micro(self) -> int:
        """How many samples go through the network at once."""
        order = self.order
        return self.recipe.micro_batch or order.batch // (order.parts if order.whole else 1)


class Recipe(TrainPass):
    """How long, on what and with which optimizer a pass trains."""

    neutral: ClassVar[frozenset[str]] = frozenset({"save_every", "workers", "log"})

    epochs: float = Field(default=1.0, gt=0, description="passes over the training data")
    steps: int | None = Field(
        default=None, ge=1, description="steps of the optimizer, in place of epochs"
    )
    batch: int | None = Field(
        default=None,
        ge=1,
        description="samples per step, over all processes; default: as in data.training",
    )
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples that go through the network at once; gradients of a step are "
        "accumulated, which saves memory and changes nothing but batch norm",
    )
    optimizer: Literal["adamw", "sgd"] = Field(
        default="adamw", description="AdamW, or gradient descent with momentum"
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="largest learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(
        default=0.0, ge=0, description="of matrices and kernels, not of biases and norms"
    )
    schedule: Schedule = Field(
        default="cosine",
        description="how the learning rate falls; one-cycle rises before, and step divides it by "
        "10 at each milestone",
    )
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        default=MILESTONES, description="of schedule: step, as shares of the steps"
    )
    warm_up: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the steps over which the rate rises; default for one-cycle: 0.3",
    )
    clip: float | None = Field(
        default=None, gt=0, description="largest norm of the gradient of all parameters together"
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="number format of matrix products; float16 scales the loss and needs a GPU",
    )
    checkpointing: bool = Field(
        default=False,
        description="recompute the activations of repeated blocks instead of keeping them",
    )
    validation: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="share of the training data that is held out to find the best state, which is "
        "kept; with 0 the last state is kept",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="stop after this many validations without improvement; one follows each epoch",
    )
    save_every: int = Field(default=100, ge=1, description="steps from one saved state to the next")
    workers: int = Field(default=0, ge=0, description="processes that prepare data")
    loss: str | None = Field(
        default=None,
        description="cross-entropy, mse, or pkg.mod:fn, a function of outputs and target that "
        "returns one tensor entry per sample; default: by the metric",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of each label that cross-entropy spreads over all classes",
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        description="blend the samples of a step in pairs, by shares from a Beta distribution with "
        "this number as both parameters, such as 0.2; 0 blends none",
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of an exponential moving average of the weights, such as 0.999; the "
        "average is validated and returned",
    )
    sync_batch_norm: bool = Field(
        default=False,
        description="in several processes, batch norm takes its statistics over all of them",
    )
    log: Log | None = Field(
        default=None, description="write loss, learning rate and validations of each step to files"
    )
    prune: Gradual | None = Field(default=None, description="zero weights gradually while training")
    layers: tuple[LayerRule, ...] = Field(
        default=(), description="rules for single layers; skip: true leaves their weights alone"
    )

    @property
    def scheduled(self) -> bool:
        """Whether more than the learning rate changes with the steps."""
        return self.prune is not None

    @property
    def code(self) -> tuple[str, ...]:
        """The user's loss."""
        return (self.loss,) if self.loss is not None and ":" in self.loss else ()

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Recipe:
        if self.patience is not None and self.validation == 0:
            raise ValueError("patience needs validation, such as validation: 0.1")
        if "milestones" in self.model_fields_set and self.schedule != "step":
            raise ValueError(f"has milestones with schedule: {self.schedule}; set schedule: step")
        if "momentum" in self.model_fields_set and self.optimizer != "sgd":
            raise ValueError(f"has momentum with optimizer: {self.optimizer}; set optimizer: sgd")
        if {"epochs", "steps"} <= self.model_fields_set and self.steps is not None:
            raise ValueError("has epochs and steps; leave one of them out")
        if self.batch is not None and (self.micro_batch or 0) > self.batch:
            raise ValueError(f"micro-batch {self.micro_batch} is more than a batch; leave it out")
        if self.sync_batch_norm and self.micro_batch is not None:
            raise ValueError("sync-batch-norm needs whole batches; leave micro-batch out")
        return self

    def course(self, training: Training, inputs: Sequence[TensorSpec], seed: int) -> Course:
        """Return the course of training a model with these inputs.

        Raises:
            SpecError: the batch does not divide among the processes, or is not the model's.
            DataError: there are fewer samples than a batch.
        """
        batch, parts = self.batch or training.batch, training.ranks.size
        axis = inputs[0].shape[0] if inputs[0].shape else None
        fixed = axis if isinstance(axis, int) else None
        if batch % parts:
            raise SpecError(
                "batch",
                f"is {batch}, and {parts} processes share it",
                f"set a multiple of {parts}, such as batch: {-(-batch // parts) * parts}",
            )
        if fixed is not None and (self.micro_batch or batch // parts) != fixed:
            raise SpecError(
                "micro-batch",
                f"is {self.micro_batch or batch // parts}, but the model takes {fixed} at a time",
                f"set micro-batch: {fixed} and a batch that is a multiple of it",
            )
        order = Order(
            training.data.samples, batch, seed, self.validation, parts, whole=fixed is not None
        )
        if order.steps_in_epoch == 0:
            raise DataError(
                "training data",
                f"has {len(order.trained)} samples to train on, too few for a step of {batch}",
                f"set batch: {max(1, len(order.trained) // parts * parts)} or less, or add data",
            )
        mixup = mixup_of(self.mixup, inputs, training.data.target)
        course = Course(self, training, order, mixup)
        assert self.prune is None or course.prunings  # checks them
        return course

    def apply_training(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
        training: Training,
    ) -> Outcome:
        """Return the trained model.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`.
        """
        course = self.course(training, carrier.inputs, context.seed)
        return self.train_on(carrier, context, course)

    @abstractmethod
    def train_on(self, carrier: Carrier, context: PassContext, course: Course) -> Outcome:
        """Return the model trained on a course."""

    def skip_reasons(self, carrier: Carrier) -> dict[str, str]:
        """Return for each layer why it is not trained; empty if it is.

        Raises:
            SpecError: a rule matches no layer.
        """
        return skip_reasons(self.layers, carrier.layers())

    def pruned_layers(self, carrier: Carrier) -> dict[str, Layer]:
        """Return the layers that lose weights while they are trained, by name.

        Raises:
            SpecError: ``prune`` is set, and there is none.
        """
        if self.prune is None:
            return {}
        each = self.prune.scope == "local"
        chosen = choose_layers(carrier, self.prune.target, self.prune.block, (), each=each)
        reasons = self.skip_reasons(carrier)
        layers = {
            layer.name: layer
            for layer in carrier.layers()
            if not chosen[layer.name][1] and not reasons[layer.name]
        }
        if not layers:
            raise SpecError(
                "prune",
                "touches no layer",
                "change its block or target, or the layers that are skipped",
            )
        return layers

    def plan(self, carrier: Carrier) -> tuple[LayerPlan, ...]:
        """Return the plan's rows: which layers are trained, and which are pruned meanwhile.

        Raises:
            SpecError: a rule matches no layer, nothing would be trained, the prunings do not fit
                into the steps, or this machine cannot compute in the precision.
        """
        check_precision(self.precision)
        if self.prune is not None and self.steps is not None:
            self.prune.ends(self.steps)
        reasons = self.skip_reasons(carrier)
        actions = dict.fromkeys(reasons, "train")
        actions |= dict.fromkeys(self.pruned_layers(carrier), f"train{self.pruned_note}")
        return plan_layers(self.name, actions, reasons)

    @property
    def pruned_note(self) -> str:
        """What the plan adds to the action on a layer that is pruned."""
        return "" if self.prune is None else f", {100 * self.prune.target:g} % zero"

    def pruned_notes(self, context: PassContext) -> tuple[str, ...]:
        """Return notes on what weights that are zeroed in training will gain."""
        return () if self.prune is None else sparse_notes(context.targets, [""])

    def freeze(self, carrier: Carrier, module: nn.Module) -> None:
        """Keep skipped layers' weights and biases from being trained, in place.

        Raises:
            SpecError: nothing is left to train.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        reasons = self.skip_reasons(carrier)
        for layer in carrier.layers():
            for name in (layer.weight, layer.bias) if reasons[layer.name] else ():
                if name is not None and PREFIX + name in parameters:
                    parameters[PREFIX + name].requires_grad_(False)
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise SpecError(
                f"pass {self.name!r}",
                "has nothing to train: the factory or the rules freeze every parameter",
                "leave requires_grad on, or change the rules",
            )

    def regulators(self, carrier: Carrier, module: nn.Module, steps: int) -> tuple[Regulator, ...]:
        """Return the regulators that keep zeros zero and prune gradually."""
        parameters = dict(module.named_parameters())
        weights = {
            PREFIX + layer.weight: layer
            for layer in carrier.layers()
            if PREFIX + layer.weight in parameters
        }
        kept = ZerosKept(module, list(weights))
        regulators: list[Regulator] = [kept] if kept.masks else []
        if self.prune is not None:
            pruned = self.pruned_layers(carrier)
            thinned = {name: layer for name, layer in weights.items() if layer.name in pruned}
            regulators.append(GradualPruning(module, thinned, self.prune, steps))
        return tuple(regulators)

    def outcome(self, carrier: Carrier, trained: Trained, metric: Measure | None) -> Outcome:
        """Return the model with the trained weights, and how the training went."""
        names = {PREFIX + name: name for name in carrier.tensors()}
        changes = {names[n]: t for n, t in trained.tensors.items() if n in names}
        reasons = self.skip_reasons(carrier)
        layers = tuple(
            LayerOutcome(layer.name, layer.dtype, details={"trained": True})
            for layer in carrier.layers()
            if not reasons[layer.name]
        )
        after = carrier.with_weights(changes)
        return Outcome(after, layers, trained.notes(metric), trained.record())
