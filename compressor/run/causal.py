"""Whether a model reads text as a spec gives it: windows of one stream are for causal models,
and no sample has more tokens than the model has positions.

An encoder has never seen such a stream: each of its samples begins and ends with special tokens,
and it reads every token with all that follow it. Ranges from windows are not those that it will
have, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from compressor.calibration.sources.tokens import TokenSource
from compressor.errors import SpecError
from compressor.models.transformers.carrier import auto_class_name, longest_text
from compressor.models.transformers.lengths import positions_of
from compressor.models.transformers.networks import CONFIG, is_causal, read_config
from compressor.spec.keys import MetricKeys
from compressor.spec.load import DataEntry, Spec
from compressor.types.tensors import TensorSpec

_REMEDY = "set samples-per: line, and give one sample a line"
_LANGUAGE = "perplexity"  # judges what follows each token: the model is meant as a causal one


def check_windows(spec: Spec) -> None:
    """Check that text is cut into windows for a causal model only, as far as that is known.

    Raises:
        SpecError: the model reads each token with those that follow it, or was made for shorter
            windows.
    """
    for entry, source in _windows(spec):
        _check_length(spec, entry, source.length)
        if _causal(spec) is False:
            raise SpecError(
                f"data.{entry.role}",
                "cuts text into windows of one stream without special tokens, and the model is no "
                "causal language model",
                _REMEDY,
                where=entry.where,
            )


def _check_length(spec: Spec, entry: DataEntry, length: int) -> None:
    config = _config(spec)
    longest = None if config is None else positions_of(config)
    if longest is not None and length > longest:
        raise SpecError(
            f"data.{entry.role}",
            f"cuts text into windows of {length} tokens, and the model was made for {longest}: "
            "its answers beyond that mean nothing",
            f"set length (--length) to {longest} at most",
            where=entry.where,
        )


def check_lines(spec: Spec, network: Any, inputs: Sequence[TensorSpec]) -> None:
    """Check that lines of text are cut where the positions of a network of transformers end.

    Args:
        inputs: those of the network; they may fix how many tokens a line has.

    Raises:
        SpecError: ``length`` is greater than the network's table of positions.
    """
    longest = longest_text(network)
    for entry in spec.data.values():
        source = entry.options
        if longest is None or not isinstance(source, TokenSource) or source.in_windows:
            continue
        length = source.fitted(inputs, entry.role, entry.keys.target).length
        if length > longest:
            raise SpecError(
                f"data.{entry.role}.length",
                f"is {length}, and the model has positions for {longest} tokens",
                f"set length: {longest} or less",
                where=entry.where,
            )


def window_doubts(spec: Spec) -> list[str]:
    """Return a warning for text in windows where it is not known whether the model is causal."""
    metric = spec.metric.name if isinstance(spec.metric, MetricKeys) else spec.metric
    if metric == _LANGUAGE:
        return []
    roles = [entry.role for entry, _ in _windows(spec) if _causal(spec) is None]
    return [
        f"data.{role}: text is cut into windows, as causal language models read it; whether this "
        "model is one is not known. For an encoder, set samples-per: line"
        for role in roles
    ]


def _windows(spec: Spec) -> Iterator[tuple[DataEntry, TokenSource]]:
    for entry in spec.data.values():
        if isinstance(entry.options, TokenSource) and entry.options.in_windows:
            yield entry, entry.options


def _causal(spec: Spec) -> bool | None:
    """Return whether the model is causal; ``None`` where nothing says so, as in an ONNX file."""
    config = _config(spec)
    return None if config is None else is_causal(config, spec.model.part)


def _config(spec: Spec) -> dict[str, Any] | None:
    """Return the configuration of a model of transformers, if it is one."""
    factory = spec.model.factory
    named = factory is None or auto_class_name(factory) is not None
    if not named or spec.checkpoint is None or not (spec.checkpoint / CONFIG).is_file():
        return None
    return read_config(spec.checkpoint)
