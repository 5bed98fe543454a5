"""What exporters will write: checked, and their files' sizes predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.errors import CompressorError, located
from compressor.graph.costs import model_bytes
from compressor.run.model import OpenedModel
from compressor.spec.load import Spec
from compressor.types.carrier import Carrier
from compressor.types.exporter import Exporter


@dataclass(frozen=True)
class ExportPlan:
    """What one exporter will write.

    Attributes:
        at_most: the files may take less, which shows once the weights are coded.
        estimate: they may take less or more, which shows in the run.
        float_bytes: what they will be compared with: the size of the user's own files, or of the
            float model in this format; ``None`` where that is not predicted.
    """

    format: str
    bytes: int
    at_most: bool = False
    estimate: bool = False
    float_bytes: int | None = None

    @property
    def size_ratio(self) -> float | None:
        """The predicted size over that of the float model."""
        return self.bytes / self.float_bytes if self.float_bytes else None


def plan_exports(
    spec: Spec,
    model: OpenedModel,
    carrier: Carrier,
    *,
    guessed: bool,
    like: Sequence[ExportPlan] = (),
) -> list[ExportPlan]:
    """Check what exporters will be given, and predict what they will write.

    Args:
        guessed: a pass leaves a size that is an estimate.
        like: what the same exporters were planned to write of the same float model.

    Raises:
        SpecError: an exporter cannot write the model.
    """
    exports = []
    for index, exporter in enumerate(spec.exports):
        with located(spec.where("exports", index)):
            plan = ExportPlan(
                exporter.format,
                exporter.checked_bytes(carrier),
                exporter.bound,
                guessed or exporter.estimated,
                like[index].float_bytes if like else _float_bytes(exporter, model),
            )
        exports.append(plan)
    return exports


def _float_bytes(exporter: Exporter, model: OpenedModel) -> int | None:
    """Return the size that a run will compare an artifact with, as far as it is known cheaply."""
    own = model.own_bytes(exporter.format)
    if own is not None or exporter.estimated:
        return own
    try:
        return exporter.checked_bytes(model.carrier)
    except CompressorError:  # options that only a compressed model can have
        return model_bytes(model.carrier)
