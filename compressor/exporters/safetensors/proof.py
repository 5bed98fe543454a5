"""Proof that ``transformers`` opens a written directory with the weights that were meant.

The class is built on the ``meta`` device and prepared for codes by the library itself; then each
written tensor has a parameter of its shape, and no parameter is without values. That takes no
memory. A model that is small enough is also opened, and its outputs for a few inputs are compared
with those of its class with dequantized weights.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log10, prod
from pathlib import Path
from typing import Any

import torch

from compressor.errors import ArtifactError, listed
from compressor.exporters.safetensors.code_layouts import COMPRESSED_TENSORS, caches_of
from compressor.exporters.safetensors.stream_plan import StreamPlan, cache_scales
from compressor.exporters.safetensors.transformers_runner import FAILURES, by_itself, load_directory
from compressor.models.checkpoint.dequantized import dequantized
from compressor.models.checkpoint.folder import CONFIG
from compressor.models.checkpoint.stacked_experts import restacked
from compressor.models.rounded_inputs import round_inputs_of
from compressor.models.transformers.cached_attention import round_cache_of
from compressor.models.transformers.classes import saved_class, silent
from compressor.models.transformers.networks import reason_of
from compressor.models.transformers.reading import Names, Reading, float_class_of, reading_of
from compressor.types.carrier import Carrier
from compressor.types.exporter import Check
from compressor.types.layers import StoredTensor
from compressor.types.rounded_inputs import CacheScheme, InputScheme

_MOST_BYTES = 1 << 30  # of float weights of a model that is opened; it is then in memory twice
_EXACT_DB = 50.0  # by trial: a right directory gives equal outputs, a wrong layer 0 to 40 dB
_TOKENS = 12
_SAMPLES = 8000  # of a sound: half a second at 16 kHz
_PLACES = "transformers has a place for each tensor"
OUTPUTS = "gives the dequantized outputs"


def prove(carrier: Carrier, plan: StreamPlan, directory: Path) -> tuple[Check, ...]:
    """Return what ``transformers`` makes of a written directory.

    Where there is no configuration, or nothing is quantized, there is nothing to prove.

    Raises:
        ArtifactError: it would not read the codes, or gives other outputs.
    """
    folder = carrier.folder
    if folder is None or "quantization_config" not in json.loads(plan.texts.get(CONFIG, b"{}")):
        return ()
    other = {s.codes.name for s in plan.shards} - {COMPRESSED_TENSORS.name}
    if other:
        why = f"not compared: transformers reads layout {other.pop()} with the package gptqmodel"
        return (Check(OUTPUTS, why, known=False),)
    network, why = float_class_of(carrier)
    reading = reading_of(carrier, by_names=False)
    if network is None or reading is None:
        return (Check(_PLACES, f"not proved: {why}", known=False),)
    if importlib.util.find_spec("compressed_tensors") is None:
        why = "not proved: install compressed-tensors"
        return (Check(_PLACES, why, known=False),)
    tensors, caches = carrier.tensors(), caches_of(carrier)
    kept = {name for name, tensor in tensors.items() if tensor.codes is None}
    scales = frozenset(scale.name for scale in cache_scales(caches, tensors))
    known, detail = _check_places(plan, kept, scales, directory, reading)
    places = Check(_PLACES, detail)
    large = too_large(tensors.values())
    if large is not None:
        return places, large
    rounding = Rounding(_rounded(tensors, reading), caches if known else {})
    return places, _compare_outputs(tensors, network, directory, rounding)


def too_large(tensors: Iterable[StoredTensor]) -> Check | None:
    """Return the check that says that a model is too large to be opened; ``None`` if it is not."""
    size = sum(tensor.float_nbytes for tensor in tensors)
    if size <= _MOST_BYTES:
        return None
    why = f"not compared: {size / 1e9:.1f} GB of float weights are more than 1 GiB"
    return Check(OUTPUTS, why, known=False)


@dataclass(frozen=True)
class Rounding:
    """What a network rounds as it runs, by paths in its class.

    Attributes:
        inputs: those of linear layers.
        caches: the keys and values that attention keeps.
    """

    inputs: Mapping[str, InputScheme] = field(default_factory=dict)
    caches: Mapping[str, CacheScheme] = field(default_factory=dict)

    def put_on(self, network: Any) -> None:
        """Let a network round so from now on."""
        for path, inputs in self.inputs.items():
            round_inputs_of(network.get_submodule(path), inputs)
        for path, cache in self.caches.items():
            round_cache_of(network.get_submodule(path), cache)


NOTHING_ROUNDED = Rounding()


def _rounded(tensors: Mapping[str, StoredTensor], reading: Reading) -> dict[str, InputScheme]:
    """Return how the inputs of linear layers are rounded, by their paths in the class."""
    linear = set(reading.linear)
    found = {}
    for name, tensor in tensors.items():
        path = reading.module(name)
        if tensor.codes is not None and tensor.codes.inputs is not None and path in linear:
            found[path] = tensor.codes.inputs
    return found


def _check_places(
    plan: StreamPlan,
    kept: Collection[str],
    scales: Collection[str],
    directory: Path,
    reading: Reading,
) -> tuple[bool, str]:
    """Compare written tensors with the parameters of the class, prepared for codes.

    Args:
        scales: those of keys and values. transformers 5.24 calls the cache by a name that
            compressed-tensors 0.20 does not look for, and so reads none.

    Returns:
        Whether scales of keys and values are read, and what was compared.
    """
    subject = f"artifact {directory.name!r}"
    try:
        network, mapping = _prepared(directory)
    except FAILURES as error:
        raise ArtifactError(
            subject,
            f"transformers does not prepare a {reading.class_name} for it ({reason_of(error)})",
            "report it, with the config.json",
        ) from error
    entries = {name: entry for shard in plan.shards for name, entry in shard.entries.items()}
    state, follow = network.state_dict(), Names(network, mapping)
    taken: set[str] = set()
    lost, misfits = [], []
    known = any(follow.place(name)[0] is not None for name in scales)
    unread = frozenset() if known else frozenset(scales)
    for name, entry in entries.items():
        if name in unread:
            continue
        place, operations = follow.place(name)
        if place is None:
            # What the float class does not read either is not missed.
            lost += [] if name in kept and name not in reading.places else [name]
            continue
        taken.add(place)
        if not operations and tuple(state[place].shape) != entry.shape:
            misfits.append(name)
    tied = network.get_expanded_tied_weights_keys(all_submodels=True)
    before = reading.network.state_dict().keys() - set(reading.places.values())
    bare = sorted(state.keys() - taken - before - tied.keys())
    for names, problem in (
        (lost, "are read by no layer"),
        (misfits, "do not fit their layers"),
        (bare, "are not in the file"),
    ):
        if names:
            raise ArtifactError(
                subject,
                f"{listed(names)} {problem} of {reading.class_name} in transformers",
                "skip these layers with --skip, and report it",
            )
    compared = f"{len(entries) - len(unread)} tensors of {reading.class_name}"
    if unread:
        compared += f"; this version does not read the {len(unread)} scales of keys and values"
    return known, compared


def _prepared(directory: Path) -> tuple[Any, list[Any]]:
    """Return the class on the ``meta`` device as the library prepares it, and its conversions."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.quantizers.auto import AutoHfQuantizer

    with silent(), by_itself():
        network_class = saved_class(directory)
        config = network_class.config_class.from_pretrained(directory, local_files_only=True)
        quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        quantizer.validate_environment()
        with torch.device("meta"):
            network = network_class(config)
            quantizer.preprocess_model(network)
        return network, get_model_conversion_mapping(network, hf_quantizer=quantizer)


def _compare_outputs(
    tensors: Mapping[str, StoredTensor],
    network: Any,
    directory: Path,
    rounding: Rounding,
) -> Check:
    """Compare the outputs of a directory with those of its class with dequantized weights."""
    subject = f"artifact {directory.name!r}"
    written, loading = load_directory(directory, subject, _usual_dtype(tensors.values()))
    weights = {name: dequantized(tensor).to(tensor.dtype) for name, tensor in tensors.items()}
    return compare(
        written, restacked(weights, network.config.to_dict()), network, subject, loading, rounding
    )


def _usual_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype | str:
    """Return the floating-point type that most elements have.

    A config.json that names another, as of a network trained on in float32, would round all sums.
    """
    sizes = Counter[torch.dtype]()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] += prod(tensor.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="auto")


def compare(
    written: Any,
    weights: Mapping[str, torch.Tensor],
    network: Any,
    subject: str,
    loading: Mapping[str, Any],
    rounding: Rounding = NOTHING_ROUNDED,
) -> Check:
    """Compare the outputs of a written network with those of its class with the weights meant.

    Args:
        written: the network as it was opened.
        weights: what is meant, by the names of the float checkpoint.
        network: one of its class, whose configuration is that of the float model.
        loading: the library's report on the written network; nothing for one that was whole.
        rounding: what is rounded as it runs.

    Raises:
        ArtifactError: they differ, or the written network does not run.
    """
    try:
        with silent():
            reference, expected = type(network).from_pretrained(
                None,
                config=network.config,
                state_dict=dict(weights),
                dtype=written.dtype,
                local_files_only=True,
                output_loading_info=True,
            )
    except FAILURES as error:
        return Check(OUTPUTS, f"not compared: {reason_of(error)}", known=False)
    lost = {k for k in loading.get("missing_keys", ()) if k not in expected["missing_keys"]}
    if lost or loading.get("mismatched_keys"):
        raise ArtifactError(
            subject,
            f"transformers finds no values for {listed(sorted(lost)) or 'some tensors'}",
            "skip these layers with --skip, and report it",
        )
    made_up = sorted(expected["missing_keys"])
    _copy(made_up, reference, written)
    rounding.put_on(reference)
    taken = _taken(reference.eval())
    if isinstance(taken, str):
        why = f"not compared: no inputs are known that it takes ({taken})"
        return Check(OUTPUTS, why, known=False)
    feed, wanted = taken
    try:
        distance = _distance_db(wanted, _outputs(written, feed))
    except FAILURES as error:
        raise ArtifactError(
            subject,
            f"does not run in transformers ({reason_of(error)}), with dequantized weights it does",
            "report it, with the config.json",
        ) from error
    # Equal weights may lie in memory in other ways, of which 16-bit sums are rounded otherwise.
    if distance < _EXACT_DB and not _same_weights(reference, written):
        raise ArtifactError(
            subject,
            f"in transformers its outputs are {distance:.1f} dB from those of the dequantized "
            f"weights; at least {_EXACT_DB:.0f} dB are expected",
            "report it, with the config.json",
        )
    shown = "equal" if distance == float("inf") else f"{distance:.0f} dB"
    shown += " with equal weights" if distance < _EXACT_DB else ""
    shown = f"{shown}, {' and '.join(feed)}"
    lacking = f"; the model lacks {listed(made_up)}, and values were made up" if made_up else ""
    return Check(OUTPUTS, shown + lacking)


def _copy(names: Iterable[str], network: Any, other: Any) -> None:
    """Give another network the values that one has; the library draws what a file lacks."""
    source, into = network.state_dict(), other.state_dict()
    for name in names:
        if name in source and name in into:
            into[name].copy_(source[name])


def _same_weights(reference: Any, written: Any) -> bool:
    """Return whether two networks, one of which is decompressed, have the same parameters."""
    wanted, got = dict(reference.named_parameters()), dict(written.named_parameters())
    return wanted.keys() <= got.keys() and all(
        torch.equal(value.to(torch.float32), got[name].to(torch.float32))
        for name, value in wanted.items()
    )


def _taken(network: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]] | str:
    """Return inputs that a network takes and its outputs, or why it takes none that are known."""
    why = ""
    try:
        for feed in _feeds(network):
            try:
                return feed, _outputs(network, feed)
            except FAILURES as error:
                why = why or reason_of(error)
    except FAILURES as error:  # its configuration does not say what is taken
        why = reason_of(error)
    return why


def _feeds(network: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs that a network may take, simpler ones first."""
    config, main = network.config, network.main_input_name
    draw = torch.Generator().manual_seed(0)
    tokens = {"input_ids": _token_ids(config)}
    pixels = {"pixel_values": torch.randn(_picture(config), generator=draw)}
    answer = {"decoder_input_ids": _token_ids(config)} if config.is_encoder_decoder else {}
    bands, frames = getattr(config, "num_mel_bins", 80), getattr(config, "max_source_positions", 50)
    by_main = {
        "input_ids": tokens,
        "pixel_values": pixels,
        "input_values": {"input_values": torch.randn(1, _SAMPLES, generator=draw)},
        "input_features": {"input_features": torch.randn(1, bands, 2 * frames, generator=draw)},
    }
    yield by_main.get(main, tokens) | answer
    yield tokens | pixels


def _token_ids(config: Any) -> torch.Tensor:
    """Return some tokens, none of which has a meaning of its own."""
    text = config.get_text_config()
    special = set(_special(config.to_dict()))
    usual = [i for i in range(getattr(text, "vocab_size", None) or 0) if i not in special]
    return torch.tensor([usual[:: max(1, len(usual) // _TOKENS)][:_TOKENS]])


def _special(values: Mapping[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _special(value)
        elif str(key).endswith(("token_id", "token_index")):
            yield from value if isinstance(value, list) else [value]


def _picture(config: Any) -> tuple[int, ...]:
    """Return the shape of a picture that a network takes."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return 1, getattr(vision, "num_channels", None) or 3, height, width


def _outputs(network: Any, feed: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a network that are floating-point tensors, as float64."""
    values = {k: v.to(network.dtype) if v.is_floating_point() else v for k, v in feed.items()}
    takes = inspect.signature(network.forward).parameters
    options = {"use_cache": False} if "use_cache" in takes else {}
    with silent(), by_itself(), torch.inference_mode():
        result = network(**values, **options, return_dict=True).to_tuple()
    tensors = [value for value in result if isinstance(value, torch.Tensor)]
    return [value.to(torch.float64) for value in tensors if value.is_floating_point()]


def _distance_db(wanted: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    """Return the signal-to-noise ratio of all outputs together; infinite if they are equal."""
    pairs = list(zip(wanted, got, strict=True))
    if all(torch.equal(want.nan_to_num(), other.nan_to_num()) for want, other in pairs):
        return float("inf")
    signal = sum(float(want.square().sum()) for want, _ in pairs)
    error = sum(float((want - other).square().sum()) for want, other in pairs)
    return 10 * log10(signal / error) if 0 < error < float("inf") and signal > 0 else 0.0
