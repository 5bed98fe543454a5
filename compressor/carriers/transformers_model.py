"""Modules that ``transformers`` builds from a Hugging Face directory, their weights mapped."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from compressor.carriers.matching import check_finite
from compressor.carriers.torch_carrier import TorchCarrier
from compressor.carriers.weight_files import read_weights
from compressor.errors import ModelError, SpecError
from compressor.names import close_names, listed, suggestion
from compressor.quiet import quiet_libraries
from compressor.types.tensors import TensorSpec

CONFIG = "config.json"
_REFERENCE = re.compile(r"transformers[.:](\w+)")
_ATTENTION = "eager"  # products and softmax one by one: what lowers to the plainest graph
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FIXED = ("architectures", "auto_map", "model_type", "quantization_config", "transformers_version")
_WRONG_CLASS = "Unrecognized configuration class"  # begins the ValueError of an auto class


class MappedCarrier(TorchCarrier):
    """A module whose parameters are views of mapped files, from the start."""

    def load(self, checkpoint: Path) -> None:
        """Look at every weight; they are in place already.

        Raises:
            ModelError: a tensor holds NaN or infinity.
        """
        buffers = dict(self.module.named_buffers())
        check_finite(self.module.state_dict(), str(checkpoint), may_be_infinite=buffers)


def auto_class_name(factory: str) -> str | None:
    """Return the class that ``transformers.NAME`` or ``transformers:NAME`` means, else ``None``."""
    found = _REFERENCE.fullmatch(factory)
    return found[1] if found else None


def library_version() -> str:
    """Return the version of ``transformers``; raises ``SpecError`` where it is not installed."""
    return str(_library().__version__)


def open_pretrained(
    name: str, directory: Path, config: Mapping[str, Any], inputs: Sequence[TensorSpec]
) -> MappedCarrier:
    """Build the network that a directory's ``config.json`` describes.

    Nothing is fetched and no code but that of ``transformers`` runs. The parameters are views of
    the memory-mapped weight files in the element type that most of them have, unless ``config``
    names another ``dtype``. The module returns no key-value cache, so that it can be lowered.

    Args:
        name: a ``transformers`` auto class, such as ``AutoModelForCausalLM``.
        directory: holds ``config.json`` and the weights.
        config: replaces values of ``config.json``.
        inputs: the module's; where there are none, the main input that its class names.

    Raises:
        SpecError: there is no such auto class or value, the class is for other models, the
            directory has no configuration, or ``transformers`` is not installed.
        ModelError: the configuration is malformed, of an unknown kind, or disagrees with the
            weights.
    """
    library = _library()
    auto = _auto_class(library, name)
    stored = read_config(directory)
    network = _network(library, auto, {**stored, **_changes(config, stored)}, directory)
    single = directory / "model.safetensors"
    whole = single.is_file() and not (directory / "model.safetensors.index.json").is_file()
    weights = read_weights(single if whole else directory)
    module = _filled(network, weights, directory, config.get("dtype"))
    return MappedCarrier(module, inputs or _usual_inputs(module), folder=directory)


def _library() -> ModuleType:
    try:
        with _silent():  # some of its modules warn of packages that they would like to have
            return importlib.import_module("transformers")
    except ImportError as error:
        raise SpecError(
            "model.factory",
            f"needs the package transformers, which does not import ({error})",
            'run pip install "compressor[transformers]"',
        ) from error


def _auto_class(library: ModuleType, name: str) -> Any:
    names = [n for n in dir(library) if n.startswith("AutoModel")]
    if name not in names:
        raise SpecError(
            "model.factory",
            f"'transformers.{name}' is no auto class of transformers {library.__version__}",
            suggestion(name, names),
        )
    return getattr(library, name)


def read_config(directory: Path) -> dict[str, Any]:
    """Return what ``config.json`` of a float model says.

    Raises:
        SpecError: there is none.
        ModelError: it is malformed, or the model is quantized already.
    """
    if not directory.exists():
        raise SpecError(f"checkpoint {str(directory)!r}", "does not exist", "correct the path")
    path = directory / CONFIG
    if not path.is_file():
        raise SpecError(
            f"checkpoint {str(directory)!r}",
            f"has no {CONFIG}, from which a transformers class builds its network",
            "give the folder that save_pretrained wrote, or a factory of your own",
        )
    subject = f"config {str(path)!r}"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(subject, f"is not JSON ({error})", "fetch it again") from error
    if not isinstance(value, dict) or not isinstance(value.get("model_type"), str):
        raise ModelError(subject, "does not say its model_type", "fetch it again")
    if value.get("quantization_config"):
        raise ModelError(
            subject,
            "describes a model that is quantized already (quantization_config)",
            "give the float checkpoint that it was made from",
        )
    return value


def _changes(config: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the spec changes of ``config.json``, its ``dtype`` apart.

    Raises:
        SpecError: an entry does not exist, or cannot be changed.
    """
    changes = dict(config)
    dtype = changes.pop("dtype", None)
    names = [str(d).removeprefix("torch.") for d in _DTYPES]
    if dtype is not None and dtype not in names:
        raise SpecError("model.config.dtype", f"is {dtype!r}", f"give one of {', '.join(names)}")
    for key in changes:
        if key not in stored or key in _FIXED:
            known = [k for k in stored if k not in _FIXED]
            raise SpecError(
                f"model.config.{key}",
                f"is no entry of {CONFIG} that can be changed",
                suggestion(key, dict.fromkeys([*known, "dtype"])),
            )
    return changes


def _network(library: ModuleType, auto: Any, values: dict[str, Any], directory: Path) -> Any:
    """Return the network on the ``meta`` device: its class and structure without memory."""
    subject = f"config {str(directory / CONFIG)!r}"
    kind = values["model_type"]
    known = library.CONFIG_MAPPING
    if kind not in known:
        if values.get("auto_map"):
            raise ModelError(
                subject,
                f"wants code of its own for model_type {kind!r} (auto_map), which never runs here",
                "write a function that builds the network, and name it in model.factory",
            )
        raise ModelError(
            subject,
            f"has model_type {kind!r}, which transformers {library.__version__} does not know",
            f"install a newer one, or correct it: {suggestion(kind, known.keys())}",
        )
    try:
        with _silent(), torch.device("meta"):
            config = _configuration(values)
            return auto.from_config(config, attn_implementation=_ATTENTION, trust_remote_code=False)
    # The class is the user's choice and the values are a stranger's: anything may be raised.
    except Exception as error:
        if _WRONG_CLASS in str(error):
            raise SpecError(
                "model.factory",
                f"'transformers.{auto.__name__}' is not for models of type {kind!r}",
                _fitting_class(library, values.get("architectures")),
            ) from error
        raise ModelError(
            subject, f"builds no network ({_reason(error)})", "correct its values"
        ) from error


def described_shapes(
    network: type[torch.nn.Module], values: Mapping[str, Any]
) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the tensors that a network of a configuration has; no memory is used.

    Args:
        network: a class of ``transformers``.
        values: the content of a ``config.json`` of its kind.

    Returns:
        Shapes by name; ``None`` where there is no such network.
    """
    try:
        with _silent(), torch.device("meta"):
            tensors = network(_configuration(values)).state_dict()
    except Exception:  # noqa: BLE001  # as in _network: sizes that do not go together
        return None
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def described_network(network: torch.nn.Module, values: Mapping[str, Any]) -> torch.nn.Module:
    """Return a network with the same weights, built as a configuration describes it.

    Args:
        network: an instance of a class of ``transformers``.
        values: the content of a ``config.json`` of its kind.

    Raises:
        ModelError: the weights do not fit such a network.
    """
    config = _configuration(values)
    weights = network.state_dict()
    dtype = next(network.parameters()).dtype
    module, found = _loaded(type(network), config, weights, dtype)
    _check_fit(type(network).__name__, found, "the smaller network")
    filled: torch.nn.Module = module.eval()
    return filled


def _configuration(values: Mapping[str, Any]) -> Any:
    """Return a configuration of a kind that the library knows, for networks without a cache."""
    config = _library().CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
    for part in (config, config.get_text_config()):
        part.use_cache = False
    config.output_hidden_states = config.output_attentions = False
    return config


def auto_class_for(saved: str) -> str:
    """Return the auto class for one named under ``architectures``, such as ``LlamaForCausalLM``."""
    task = saved.partition("For")[2]
    if saved.endswith("LMHeadModel"):
        task = "CausalLM"
    elif task == "ConditionalGeneration":
        task = "Seq2SeqLM"
    return f"AutoModelFor{task}" if task else "AutoModel"


def _fitting_class(library: ModuleType, architectures: Any) -> str:
    """Say which auto class fits the class that the checkpoint was saved from."""
    saved = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    name = auto_class_for(saved)
    if saved and name in dir(library):
        return f"use transformers.{name}: it was saved from {saved}"
    return f"it was saved from {saved}" if saved else "see the model's page for its class"


def _filled(
    network: Any, weights: Mapping[str, torch.Tensor], directory: Path, dtype: str | None
) -> torch.nn.Module:
    """Return a network of the same class and configuration that holds the weights."""
    subject = f"checkpoint {str(directory)!r}"
    usual = _usual_dtype(weights, subject)
    try:
        wanted = getattr(torch, dtype) if dtype else usual
        module, found = _loaded(type(network), network.config, weights, wanted)
    except Exception as error:  # as in _network
        raise ModelError(
            subject,
            f"does not load into {type(network).__name__} ({_reason(error)})",
            "check that config.json belongs to the weights",
        ) from error
    _check_fit(type(network).__name__, found, subject)
    filled: torch.nn.Module = module.requires_grad_(False).eval()
    codes = [name for name, tensor in weights.items() if not tensor.is_floating_point()]
    floats = {name for name, tensor in filled.state_dict().items() if tensor.is_floating_point()}
    _refuse_codes([name for name in codes if name in floats], weights, subject)
    return filled


def _loaded(
    network: Any, config: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[Any, Mapping[str, Any]]:
    """Return a network of a class with weights, and what the library says of them."""
    with _silent():
        # Without a path it looks for no other files; names of older versions are translated.
        module, found = network.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=dtype,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return module, found


def _usual_dtype(weights: Mapping[str, torch.Tensor], subject: str) -> torch.dtype:
    """Return the floating-point type that most of the weights' elements have."""
    floats = {name: t for name, t in weights.items() if t.is_floating_point()}
    _refuse_codes([n for n, t in floats.items() if t.dtype not in _DTYPES], weights, subject)
    sizes = dict.fromkeys(_DTYPES, 0)
    for tensor in floats.values():
        sizes[tensor.dtype] += tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _refuse_codes(names: list[str], weights: Mapping[str, torch.Tensor], subject: str) -> None:
    """Raise ``ModelError`` where weights are stored as something that needs scales."""
    if names:
        raise ModelError(
            subject,
            f"has {names[0]!r} as {str(weights[names[0]].dtype).removeprefix('torch.')}",
            "give the float checkpoint that it was made from",
        )


def _check_fit(network: str, found: Mapping[str, Any], subject: str) -> None:
    """Raise ``ModelError`` where names or shapes of the weights are not the network's."""
    for name, have, want in sorted(found["mismatched_keys"]):
        raise ModelError(
            subject,
            f"has {name!r} with shape {list(have)}, {network} as config.json describes it wants "
            f"{list(want)}",
            "use the config.json that belongs to the weights",
        )
    missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    problems = []
    if missing:
        problems.append(f"lacks {listed(missing)} of {network}")
    if unexpected:
        problems.append(f"has {listed(unexpected)}, which {network} does not")
    problems += [str(message) for message in found.get("error_msgs") or ()][:1]
    if not problems:
        return
    pairs = [(name, close_names(name, unexpected, 1)) for name in missing[:3]]
    near = [f"{name!r} may be its {names[0]!r}" for name, names in pairs if names]
    usual = "use the config.json of these weights, and the auto class for its architectures"
    raise ModelError(subject, " and ".join(problems), "; ".join(near) or usual)


def _usual_inputs(module: Any) -> tuple[TensorSpec, ...]:
    config, main = module.config, module.main_input_name
    if main == "input_ids" and not config.is_encoder_decoder:
        return (TensorSpec(main, ("batch", "sequence"), "int64"),)
    size = getattr(config, "image_size", None)
    if main == "pixel_values" and isinstance(size, int):
        shape = ("batch", getattr(config, "num_channels", 3), size, size)
        return (TensorSpec(main, shape, str(module.dtype).removeprefix("torch.")),)
    raise SpecError(
        "model.inputs",
        f"is empty, and {type(module).__name__} has no single usual input",
        "write e.g. inputs: {input_ids: {shape: [batch, sequence], dtype: int64}}",
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the libraries' logs, warnings and progress bars from the terminal."""
    with quiet_libraries(), redirect_stderr(StringIO()):
        yield


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:2]])[:300]
