"""``quantize-weights``: layers whose inputs are rounded, too, as the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compressor.errors import SpecError
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.run.weight_pass import Changes, Choice, Treatment
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, Scheme, WeightCodes
from compressor.types.rounded_inputs import InputScheme
from compressor.types.statistics import Block, Range, Request, found_about

COMPRESSED_TENSORS = "compressed-tensors"
_OBSERVER = "min-max"


def misfit(scheme: Scheme, inputs: InputScheme) -> str:
    """Return why no kernel multiplies such weights with such inputs; empty where some do.

    Runtimes multiply two numbers of one type.
    """
    if inputs.static and inputs.group:
        return f"{inputs.format} has a scale for each group of a token's channels"
    if inputs.format == "int8":
        fits = scheme.element == "int" and scheme.bits == 8 and scheme.symmetric
        fits = fits and scheme.granularity == "channel"
        wanted = "weights of 8 bits without zero points and with one scale a row"
    elif inputs.format == "fp8-e4m3":
        fits = scheme.element == "e4m3" and scheme.granularity == "channel"
        wanted = "weights of fp8-e4m3 with one scale a row"
    else:
        nvfp4 = scheme.scale_type == "e4m3"
        fits = scheme.element == "e2m1" and nvfp4 == (inputs.format == "nvfp4")
        wanted = f"weights of {inputs.format}"
    return "" if fits else f"inputs of {inputs.format} are multiplied with {wanted}"


def check_inputs(
    carrier: Carrier,
    layer: Layer,
    scheme: Scheme,
    inputs: InputScheme,
    targets: frozenset[str],
) -> None:
    """Check that a layer's inputs can be rounded.

    Raises:
        SpecError: the model is not a bare checkpoint, or weights and inputs do not fit together.
    """
    if not isinstance(carrier, CheckpointCarrier):
        raise SpecError(
            "activations",
            f"are rounded in a bare checkpoint, and this is a {carrier.kind} model",
            "leave out model.factory, or use the pass quantize-static or quantize-dynamic",
        )
    others = targets - {COMPRESSED_TENSORS}
    if others:
        raise SpecError(
            "activations",
            f"have no place in {' or '.join(sorted(others))}, which holds weights alone",
            "export the layout compressed-tensors alone, or use a preset without activations",
        )
    problem = misfit(scheme, inputs)
    if problem:
        raise SpecError(
            f"layer {layer.name!r}",
            f"would be {scheme}, and {problem}",
            "choose a preset with activations, or activations: float for this layer",
        )


def with_spans(carrier: Carrier, treatments: Mapping[str, Treatment]) -> dict[str, Treatment]:
    """Return treatments that ask how far the inputs go that have a stored scale.

    Raises:
        SpecError: nothing is observed of a checkpoint, or not the input of one of its layers.
    """
    asked = dict(treatments)
    for name, treatment in treatments.items():
        if treatment.inputs is None or not treatment.inputs.calibrated:
            continue
        value = carrier.observed.get(name) if isinstance(carrier, BlockCheckpoint) else None
        if value is None:
            raise SpecError(
                f"layer {name!r}",
                f"is to have {treatment.inputs} with a scale from calibration data, which never "
                "reach it",
                "set data.calibration, skip the layer, or use a scale for each token",
            )
        asked[name] = replace(treatment, span=Request(value, _OBSERVER))
    return asked


def with_input_scales(changes: Changes, choice: Choice, block: Block) -> Changes:
    """Add to a block's changes what calibration found about inputs that are rounded.

    Raises:
        DataError: it found nothing about one of them.
    """
    for weight, change in list(changes.weights.items()):
        if not isinstance(change, WeightCodes):
            continue
        name = change.layer.name
        treatment = choice.treatments[name]
        inputs = treatment.inputs
        if inputs is None:
            continue
        if treatment.span is not None:
            remedy = "use a format with a scale for each token"
            found = found_about(name, treatment.span, block.statistics, Range, remedy)
            inputs = replace(inputs, largest=max(-found.low, found.high))
        changes.weights[weight] = replace(change, inputs=inputs)
        outcome = changes.outcomes[name]
        details = dict(outcome.details)
        if inputs.largest is not None:
            details["largest_input"] = inputs.largest
        scheme = f"{outcome.scheme}, {inputs}"
        changes.outcomes[name] = replace(outcome, scheme=scheme, details=details)
    return changes
