"""Networks of ``transformers``, built from the content of a ``config.json``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from compressor.errors import (
    ModelError,
    SpecError,
    close_names,
    listed,
    message_lines,
    printable,
    suggestion,
)
from compressor.models.checkpoint import folder as checkpoint
from compressor.models.transformers.classes import (
    fitting_class,
    library,
    saved_class,
    saved_from,
    silent,
    unmapped_class,
)

CONFIG = checkpoint.CONFIG
_ATTENTION = "eager"  # separate products and softmax, which lower to the plainest graph
_MASKED = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_OF_DIFFUSERS = "_class_name"  # where config.json has the class of a network of diffusers
_FLOATS = ("Infinity", "-Infinity", "NaN")
_WRONG_CLASS = "Unrecognized configuration class"  # begins the ValueError of an auto class


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of the ``config.json`` of a float model.

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
    value: dict[str, Any] = checkpoint.read_config(path)
    if not isinstance(value.get("model_type"), str):
        other = value.get(_OF_DIFFUSERS)
        if other is None:
            raise ModelError(subject, "has no model_type", "fetch it again")
        raise ModelError(
            subject,
            f"is of diffusers ({printable(str(other))}), not of transformers",
            "name the .safetensors file beside it as the checkpoint, with a factory of your own "
            "that builds the network",
        )
    if value.get("quantization_config"):
        raise ModelError(
            subject,
            "describes a model that is quantized already (quantization_config)",
            "give the float checkpoint that it was made from",
        )
    return value


def network_of(auto: Any, values: dict[str, Any], directory: Path) -> Any:
    """Return the network on the ``meta`` device: its class and structure without memory.

    Args:
        auto: a class that builds it, such as ``AutoModelForCausalLM``.
        values: the content of ``config.json``.

    Raises:
        SpecError: the class is for other models.
        ModelError: the values describe no network.
    """
    subject = f"config {str(directory / CONFIG)!r}"
    kind = values["model_type"]
    package = library()
    configurations = package.CONFIG_MAPPING
    if kind not in configurations:
        if values.get("auto_map"):
            raise ModelError(
                subject,
                f"needs code of its own for model_type {kind!r} (auto_map), which never runs here",
                "write a function that builds the network, and name it in model.factory",
            )
        raise ModelError(
            subject,
            f"has model_type {kind!r}, which transformers {package.__version__} does not know",
            f"install a newer one, or correct it: {suggestion(kind, configurations.keys())}",
        )
    try:
        with silent(), torch.device("meta"):
            config = _configuration(values)
            if (saved := unmapped_class(auto, type(config), values)) is not None:
                return saved._from_config(config, attn_implementation=_ATTENTION)
            return auto.from_config(config, attn_implementation=_ATTENTION, trust_remote_code=False)
    except ImportError as error:
        raise ModelError(
            subject,
            f"describes a network of a package that is not installed ({reason_of(error)})",
            "install it, or write a function that builds the network, and name it in model.factory",
        ) from error
    # The class is the user's choice and the values are a stranger's: anything may be raised.
    except Exception as error:
        if _WRONG_CLASS in str(error):
            raise SpecError(
                "model.factory",
                f"'transformers.{auto.__name__}' is not for models of type {kind!r}",
                fitting_class(saved_from(values)),
            ) from error
        raise ModelError(
            subject, f"describes no network ({reason_of(error)})", "correct its values"
        ) from error


def float_network(folder: Path, *, untied: bool = False) -> tuple[Any, str]:
    """Return the class that a folder's ``config.json`` names, on the ``meta`` device.

    If there is none, return ``None`` and why: ``transformers`` is not installed, it does not have
    the class, or the class rejects the values.

    Args:
        untied: its output layer has a weight of its own, whatever the folder says.
    """
    try:
        with silent():
            network = saved_class(folder)
            config = network.config_class.from_pretrained(folder, local_files_only=True)
            if untied:
                config.tie_word_embeddings = False
            with torch.device("meta"):
                return network(config), ""
    except SpecError as error:
        return None, f"{error.problem}: {error.remedy}"
    except Exception as error:  # noqa: BLE001  # as in network_of
        return None, f"its config.json describes no network ({reason_of(error)})"


def meta_copy(module: torch.nn.Module) -> Any:
    """Return a new network of a module's class and configuration on the ``meta`` device.

    ``None`` if its class is not one of ``transformers``.
    """
    if not isinstance(module, library().PreTrainedModel):
        return None
    with silent(), torch.device("meta"):
        return type(module)(deepcopy(module.config))


def described_shapes(
    network: type[torch.nn.Module], values: Mapping[str, Any]
) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a configuration's tensors by name, or ``None`` if a class rejects it.

    No memory is used.
    """
    module = described_module(network, values)
    if module is None:
        return None
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def described_module(
    network: type[torch.nn.Module], values: Mapping[str, Any]
) -> torch.nn.Module | None:
    """Return the network of a configuration on the ``meta`` device, or ``None`` if it is rejected.

    No memory is used.
    """
    try:
        with silent(), torch.device("meta"):
            return network(_configuration(values))
    except Exception:  # noqa: BLE001  # as in network_of: sizes that do not go together
        return None


def described_network(network: torch.nn.Module, values: Mapping[str, Any]) -> torch.nn.Module:
    """Return a network with the same weights, built as a configuration describes it.

    Raises:
        ModelError: the weights do not fit such a network.
    """
    config = _configuration(values)
    weights = network.state_dict()
    dtype = next(network.parameters()).dtype
    module, loading = loaded(type(network), config, weights, dtype)
    check_fit(type(network).__name__, loading, "the smaller network")
    filled: torch.nn.Module = module.eval()
    return filled


def _configuration(values: Mapping[str, Any]) -> Any:
    """Return a configuration of a kind that the library knows, for networks without a cache."""
    config = library().CONFIG_MAPPING[values["model_type"]].from_dict(_with_floats(values))
    for part in (config, config.get_text_config()):
        part.use_cache = False
    config.output_hidden_states = config.output_attentions = False
    return config


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the defaults of its class, in the library's present names.

    Of a network of several parts, that of its text.

    Raises:
        ModelError: the class rejects the values.
    """
    try:
        config = library().CONFIG_MAPPING[values["model_type"]].from_dict(_with_floats(values))
        text: dict[str, Any] = config.get_text_config().to_dict()
    except Exception as error:  # as in network_of
        raise ModelError(
            CONFIG, f"describes no network ({reason_of(error)})", "correct its values"
        ) from error
    return text


def _with_floats(value: Any) -> Any:
    """Return values with floats where ``transformers`` writes what JSON has no numbers for.

    >>> _with_floats({"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    {'time_step_limit': [0.0, inf]}
    """
    if isinstance(value, Mapping):
        tag = value.get("__float__")
        if len(value) == 1 and isinstance(tag, str) and tag in _FLOATS:
            return float(tag)
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def is_causal(config: Mapping[str, Any], part: str | None = None) -> bool | None:
    """Return whether a network reads each token without those that follow it.

    Args:
        config: the content of its ``config.json``.
        part: the module in it that is run, if not all of it.

    Returns:
        ``None`` where its kind does not decide it.
    """
    if config.get("is_encoder_decoder"):
        return False if part is not None and part.split(".")[-1] == "encoder" else None
    if config.get("is_decoder"):
        return True
    library()
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    kind = config["model_type"]
    if kind in getattr(mappings, _MASKED):
        return False
    return True if kind in getattr(mappings, _CAUSAL) else None


def loaded(
    network: Any, config: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[Any, Mapping[str, Any]]:
    """Return a network of a class with weights, and the library's report on loading them."""
    with silent():
        # Without a path it looks for no other files; names of older versions are translated.
        module, loading = network.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=dtype,
            attn_implementation=_ATTENTION,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return module, loading


def check_fit(network: str, loading: Mapping[str, Any], subject: str, saved: str = "") -> None:
    """Raise ``ModelError`` if names or shapes of the weights are not the network's.

    Args:
        saved: the class that the weights were saved from, if it is known.
    """
    for name, have, want in sorted(loading["mismatched_keys"]):
        raise ModelError(
            subject,
            f"has {name!r} with shape {list(have)}, {network} as config.json describes it expects "
            f"{list(want)}",
            "use the config.json that belongs to the weights",
        )
    missing, unexpected = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    problems = []
    if missing:
        problems.append(f"lacks {listed(missing)} of {network}")
    if unexpected:
        problems.append(f"has {listed(unexpected)}, which {network} does not")
    problems += [str(message) for message in loading.get("error_msgs") or ()][:1]
    if not problems:
        return
    pairs = [(name, close_names(name, unexpected, 1)) for name in missing[:3]]
    near = [f"{name!r} may be its {names[0]!r}" for name, names in pairs if names]
    other = saved and saved != network
    usual = fitting_class(saved) if other else "use the config.json of these weights"
    raise ModelError(subject, " and ".join(problems), "; ".join(near) or usual)


def reason_of(error: BaseException) -> str:
    """Return an error's type and the first two lines of its message."""
    lines = message_lines(error)
    return ": ".join([type(error).__name__, *lines[:2]])[:300]
