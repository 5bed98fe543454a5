"""The layouts of directories: how a quantized weight is stored, and what the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from compressor.errors import SpecError
from compressor.exporters.safetensors.compressed_tensors import (
    Entry,
    row_multiple,
    stored_entries,
    stored_tensors,
)
from compressor.exporters.safetensors.inputs_first import (
    InputsFirst,
    configuration,
    entries_of,
    tensors_of,
)
from compressor.exporters.safetensors.quantization_config import quantization_config
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.transformers.reading import reading_of
from compressor.types.carrier import Carrier
from compressor.types.layers import QuantizedTensor, Scheme, StoredTensor
from compressor.types.rounded_inputs import CacheScheme

LayoutName = Literal["compressed-tensors", "gptq", "awq"]


@dataclass(frozen=True)
class CodeLayout:
    """A layout.

    Attributes:
        entries: describes what a tensor is stored as, or raises ``SpecError``.
        tensors: computes it, for the codes of a weight or of some of its rows.
        multiple: the multiple of rows at which these may start; ``None`` where a weight is stored
            whole, because its rows do not lie one after the other.
        configuration: the ``quantization_config`` of a model.
    """

    name: LayoutName
    entries: Callable[[StoredTensor], tuple[Entry, ...]]
    tensors: Callable[[StoredTensor, QuantizedTensor], dict[str, Tensor]]
    multiple: Callable[[Scheme], int] | None
    configuration: Callable[[Carrier], dict[str, Any]]


def caches_of(carrier: Carrier) -> Mapping[str, CacheScheme]:
    """Return how attention rounds the keys and values that it keeps, by its path."""
    return carrier.caches if isinstance(carrier, CheckpointCarrier) else {}


def _usual_configuration(carrier: Carrier) -> dict[str, Any]:
    return quantization_config(carrier.tensors(), reading_of(carrier), caches_of(carrier))


def _configuration(kind: InputsFirst, carrier: Carrier) -> dict[str, Any]:
    if not isinstance(carrier, CheckpointCarrier):
        raise SpecError(
            f"layout {kind}",
            "is written only from a bare checkpoint: transformers alone cannot open it, so "
            "nothing here could judge it",
            "leave out model.factory, or use layout: compressed-tensors",
        )
    return configuration(kind, carrier.tensors())


COMPRESSED_TENSORS = CodeLayout(
    "compressed-tensors", stored_entries, stored_tensors, row_multiple, _usual_configuration
)


def _inputs_first(kind: InputsFirst) -> CodeLayout:
    entries, tensors = partial(entries_of, kind), partial(tensors_of, kind)
    return CodeLayout(kind, entries, tensors, None, partial(_configuration, kind))


CODE_LAYOUTS: Mapping[str, CodeLayout] = {
    "compressed-tensors": COMPRESSED_TENSORS,
    "gptq": _inputs_first("gptq"),
    "awq": _inputs_first("awq"),
}
