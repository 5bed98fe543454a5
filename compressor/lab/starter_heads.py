"""What a network of ``transformers`` that reads no lines of text is judged by: by its head."""

from __future__ import annotations

from typing import Any

from compressor.lab.starter_parts import AGREEMENT, CHARACTERS, COSINE, MSE, SUBSET_ACCURACY
from compressor.types.tensors import TensorSpec

SEVERAL_LABELS, REGRESSION = "multi_label_classification", "regression"
"""``problem_type`` of a ``config.json``: samples with several labels each, or with numbers."""
CHOICES = "ForMultipleChoice"
"""Ends the names of classes that read several texts for each sample."""

_OF_NUMBERS = ("ForRegression", "ForPrediction", "ForTimeSeriesPrediction", "ForDepthEstimation")
_OF_PARTS = ("SemanticSegmentation", "TokenClassification")


def head_metric(name: str, config: Any) -> tuple[str, bool]:
    """Return the lines of a metric, and whether each sample has one score for each class.

    Args:
        name: the class of the network, such as ``ViTForImageClassification``.
        config: its configuration.
    """
    kind = getattr(config, "problem_type", None)
    if name.endswith(_OF_NUMBERS):
        return MSE, False
    if name.endswith("ForCTC"):
        # Class 0 is no character for the metric, as it is for models whose padding it is.
        return CHARACTERS if getattr(config, "pad_token_id", None) == 0 else AGREEMENT, False
    if "FrameClassification" in name:  # several at once may speak: those with scores above 0
        return COSINE, False
    if any(part in name for part in _OF_PARTS):
        return (AGREEMENT if kind is None else COSINE), False
    if "Classification" in name:
        if kind == SEVERAL_LABELS:
            return SUBSET_ACCURACY, False
        numbers = kind == REGRESSION or getattr(config, "num_labels", 2) == 1
        return (MSE, False) if numbers else (AGREEMENT, True)
    decides = name.endswith((CHOICES, "ForNextSentencePrediction"))
    return (AGREEMENT, True) if decides else (COSINE, False)


def choices_of(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a network that chooses between texts: several of each sample."""
    return tuple(TensorSpec(i.name, ("batch", "choices", *i.shape[1:]), i.dtype) for i in inputs)
