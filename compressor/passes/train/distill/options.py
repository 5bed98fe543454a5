"""Options of learning from a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from compressor.passes.train.finetune import MSE, loss_name
from compressor.spec.keys import ModelKeys
from compressor.types.options import Options

Soft: TypeAlias = Literal["kl", "mse"]
_BY_DISTANCE = (MSE, "cosine")  # metrics of outputs that are no logits


class LayerPair(Options):
    """A layer of the student and the layer of the teacher that it is to be like."""

    student: str = Field(description="layer of the student, by its path")
    teacher: str = Field(
        description="layer of the teacher, by its path; of an ONNX file also a value of the graph"
    )
    weight: float = Field(default=1.0, gt=0, description="what the pair's loss is multiplied with")


class AssistantKeys(ModelKeys):
    """A model of a size between teacher and student."""

    epochs: float = Field(
        default=1.0,
        ge=0,
        description="how long it is taught by the one before; 0 if it has been trained already",
    )

    @model_validator(mode="after")
    def _trainable(self) -> AssistantKeys:
        if self.epochs and self.factory is None:
            raise ValueError("only a factory's module is trained; give factory, or epochs: 0")
        return self


class Distillation(Options):
    """Learning from a teacher's outputs."""

    alpha: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="weight of the loss against the target; the teacher's has the rest, and with "
        "0 the training data need no target",
    )
    temperature: float = Field(
        default=4.0, gt=0, description="what logits are divided by before they are compared"
    )
    soft: Soft | None = Field(
        default=None,
        description="how outputs are compared with the teacher's: kl takes them for logits, mse "
        "for numbers; by the loss or metric if left out",
    )
    outputs: tuple[str, ...] | None = Field(
        default=None, description="names of the outputs that are compared; all if left out"
    )
    teacher: ModelKeys | None = Field(
        default=None,
        description="keys as under model: factory, checkpoint and config, or onnx; the spec's own "
        "model, as it was before the first pass, if left out",
    )
    cache: bool | None = Field(
        default=None,
        description="keep what the teacher gives on the disk, for further epochs and runs; done "
        "for up to 1 GiB if left out",
    )

    @model_validator(mode="after")
    def _learns_from_the_teacher(self) -> Distillation:
        if self.alpha == 1 and not self.compares_layers:
            raise ValueError(
                "alpha is 1 and no layers are paired, so nothing is learnt from the teacher; "
                "lower alpha, or leave the teacher out"
            )
        return self

    @property
    def compares_layers(self) -> bool:
        """Layers are compared with the teacher's, too."""
        return False

    @property
    def named_models(self) -> dict[str, Mapping[str, Any]]:
        """Models that these options name, by option; see ``Pass.other_models``."""
        return {} if self.teacher is None else {"teacher": model_keys(self.teacher)}

    def hard_loss(self, loss: str | None, metric: str | None) -> str | None:
        """Return which loss is taken against the target; ``None`` if none is.

        Raises:
            SpecError: it is not given, and the metric does not tell.
        """
        return loss_name(loss, metric) if self.alpha > 0 else None

    def soft_loss(self, loss: str | None, metric: str | None) -> Soft:
        """Return how outputs are compared with the teacher's."""
        if self.soft is not None:
            return self.soft
        distance = loss == MSE or (loss is None and metric in _BY_DISTANCE)
        return "mse" if distance else "kl"


def model_keys(keys: ModelKeys) -> dict[str, Any]:
    """Return the keys as they stand in a spec, without the ones that are only an assistant's."""
    own = set(ModelKeys.model_fields)
    return keys.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=own)
