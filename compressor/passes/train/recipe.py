"""How large the learning rate is at a step."""

from __future__ import annotations

from math import cos, pi
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from compressor.types.options import Options
from compressor.types.passes import LayerRule, TrainPass

Schedule: TypeAlias = Literal["cosine", "linear", "constant"]


def rate_factor(step: int, steps: int, schedule: Schedule, warm_up: int = 0) -> float:
    """Return what the learning rate is multiplied with at a step.

    It rises linearly over the first ``warm_up`` steps, and then falls along half a cosine
    (I. Loshchilov and F. Hutter, SGDR, 2017, arXiv:1608.03983, equation 5, without restarts), along
    a line, or not at all; to zero, which the step after the last would have.

    Args:
        step: the step, from 0.
        steps: how many there are.
        schedule: how it falls.
        warm_up: how many steps it rises, fewer than ``steps``.

    Raises:
        ValueError: the step or the warm-up lies outside of the training.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} lies outside of {steps} steps")
    if not 0 <= warm_up < steps:
        raise ValueError(f"{warm_up} steps of warm-up do not fit into {steps} steps")
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    passed = (step - warm_up) / (steps - warm_up)
    if schedule == "cosine":
        return 0.5 * (1 + cos(pi * passed))
    return 1 - passed if schedule == "linear" else 1.0


Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]


class Gradual(Options):
    """Pruning while training: weights of least magnitude go, ever fewer at a time."""

    target: float = Field(gt=0, lt=1, description="share of the weights that is zero at the end")
    scope: Literal["global", "local"] = Field(
        default="local",
        description="local zeroes the same share of each layer; global ranks all weights together",
    )
    begin: float = Field(default=0.0, ge=0, lt=1, description="share of the training before it")
    end: float = Field(
        default=0.7, gt=0, le=1, description="share of the training after which no more weights go"
    )
    every: int = Field(default=10, ge=1, description="steps from one pruning to the next")
    block: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = Field(
        default=(1, 1), description="rows and columns that go together"
    )
    rewind: int | None = Field(
        default=None,
        ge=0,
        description="once the last weights are gone, give those that remain the values that they "
        "had after this many steps, and train on (the lottery ticket); left out, they keep theirs",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Gradual:
        if self.end <= self.begin:
            raise ValueError(f"end {self.end:g} is not after begin {self.begin:g}")
        return self


class Recipe(TrainPass):
    """How long, on what and with which optimizer a pass trains."""

    neutral: ClassVar[frozenset[str]] = frozenset({"save_every", "workers"})

    epochs: float = Field(default=1.0, gt=0, description="passes over the training data")
    steps: int | None = Field(
        default=None, ge=1, description="steps of the optimizer, in place of epochs"
    )
    batch: int | None = Field(
        default=None,
        ge=1,
        description="samples in a step, over all processes; as in data.training if left out",
    )
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples that go through the network at once; gradients of a step are "
        "accumulated, which saves memory and changes nothing else but for batch norm",
    )
    optimizer: Literal["adamw", "sgd"] = Field(
        default="adamw", description="AdamW, or gradient descent with momentum"
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="largest learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(
        default=0.0, ge=0, description="of matrices and kernels, not of biases and norms"
    )
    schedule: Schedule = Field(default="cosine", description="how the learning rate falls")
    warm_up: float = Field(
        default=0.0, ge=0, lt=1, description="share of the steps in which the rate rises"
    )
    clip: float | None = Field(
        default=None, gt=0, description="longest gradient, of all parameters together"
    )
    precision: Precision = Field(
        default="float32",
        description="what products are computed in; float16 scales the loss and needs a GPU",
    )
    checkpointing: bool = Field(
        default=False,
        description="compute activations of repeated blocks again in place of keeping them",
    )
    validation: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="share of the training data that is held out to find the best state, which is "
        "the one that is kept; with 0 the last is",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="stop after so many validations without a better one; one follows each epoch",
    )
    save_every: int = Field(default=100, ge=1, description="steps from one saved state to the next")
    workers: int = Field(default=0, ge=0, description="processes that prepare data")
    loss: str | None = Field(
        default=None,
        description="cross-entropy, mse, or pkg.mod:fn, a function of outputs and target that "
        "returns one tensor entry a sample; by the metric if left out",
    )
    prune: Gradual | None = Field(default=None, description="zero weights gradually while training")
    layers: tuple[LayerRule, ...] = Field(
        default=(), description="rules for single layers; skip: true leaves their weights alone"
    )

    @property
    def code(self) -> tuple[str, ...]:
        """The user's loss."""
        return (self.loss,) if self.loss is not None and ":" in self.loss else ()

    @model_validator(mode="after")
    def _patience_needs_validation(self) -> Recipe:
        if self.patience is not None and self.validation == 0:
            raise ValueError("patience needs validation, such as validation: 0.1")
        return self
