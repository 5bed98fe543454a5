"""Classes of ``transformers``, and which of them a ``config.json`` names."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import ModelError, SpecError
from compressor.files import read_json
from compressor.models.checkpoint.folder import CONFIG
from compressor.progress import quiet_libraries

_READS = {
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
_TASK = re.compile(r"For([A-Z]\w*)")  # not that of a Former, such as RoFormerForMaskedLM
_BASE = "MODEL_MAPPING_NAMES"
_TEXT_ENCODING = "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"


@contextmanager
def silent() -> Iterator[None]:
    """Keep warnings, logs and progress bars of libraries from the terminal."""
    with quiet_libraries(), redirect_stderr(StringIO()):
        yield


def library() -> ModuleType:
    """Return the module ``transformers``; raise ``SpecError`` if it does not import."""
    try:
        with silent():  # some of its modules warn of packages that they would like to have
            return importlib.import_module("transformers")
    except ImportError as error:
        raise SpecError(
            "model.factory",
            f"needs the package transformers, which does not import ({error})",
            'run pip install "compressor[transformers]"',
        ) from error


def saved_from(config: Mapping[str, Any]) -> str:
    """Return the class that a ``config.json`` names first, or an empty text."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def saved_class(directory: Path) -> Any:
    """Return the class that a directory's ``config.json`` names first.

    Raises:
        SpecError: it names none, the library does not have it, or there is no library.
    """
    subject = f"checkpoint {str(directory)!r}"
    try:
        config = read_json(directory / CONFIG, subject, "cannot be read", constants=True)
        name = str(config["architectures"][0])
    except (ModelError, LookupError, TypeError) as error:
        raise SpecError(
            subject,
            f"its {CONFIG} names no architecture",
            f"give a Hugging Face directory, whose {CONFIG} says which class it is",
        ) from error
    package = library()
    with silent():
        named = getattr(package, name, None)
    if isinstance(named, type) and issubclass(named, package.PreTrainedModel):
        return named
    raise SpecError(
        subject,
        f"is a {name!r}, which transformers {package.__version__} does not have",
        "models with code of their own are not run",
    )


def auto_class_for(saved: str) -> str:
    """Return the auto class for one named under ``architectures``, such as ``LlamaForCausalLM``."""
    found = _TASK.search(saved)
    task = found[1] if found else ""
    if saved.endswith("LMHeadModel"):
        task = "CausalLM"
    elif task == "ConditionalGeneration" or not task:
        task = _listed_task(saved) or (task and "Seq2SeqLM")
    name = f"AutoModelFor{task}" if task else "AutoModel"
    try:
        return name if hasattr(library(), name) else _listing_class(saved)
    except SpecError:
        return name


def _listing_class(saved: str) -> str:
    """Return the auto class that builds a class, where its name says no task that has one.

    ``Swin2SRForImageSuperResolution`` is built by ``AutoModelForImageToImage``. What none builds,
    such as ``PatchTSTForPrediction``, is left to ``AutoModel``, which then builds what was saved.
    """
    autos = importlib.import_module("transformers.models.auto.modeling_auto")
    for name, auto in vars(autos).items():
        if name.startswith("AutoModelFor"):
            built = auto._model_mapping._model_mapping.values()
            if any(saved in (names if isinstance(names, tuple) else (names,)) for names in built):
                return name
    return "AutoModel"


def _listed_task(saved: str) -> str:
    """Return the task of a class whose name does not say it, by where the library lists it.

    A class that writes text is listed by what it reads. The encoder of a text-to-text network,
    saved alone, is listed for encoding text and not as the network of its type.
    """
    try:
        library()
    except SpecError:
        return ""
    mappings = importlib.import_module("transformers.models.auto.modeling_auto")
    tasks = [task for task, name in _READS.items() if saved in getattr(mappings, name).values()]
    if tasks:
        return tasks[0]
    encodes = saved in getattr(mappings, _TEXT_ENCODING).values()
    return "TextEncoding" if encodes and saved not in getattr(mappings, _BASE).values() else ""


def unmapped_class(auto: Any, kind: type, values: Mapping[str, Any]) -> Any:
    """Return the class that a model was saved from, where no auto class builds it.

    The text decoder of a larger model, saved alone, may have a type that no auto class knows. A
    part with a class of its own, such as ``LongT5EncoderModel``, may have the type of the whole.

    Args:
        auto: the auto class that is asked for.
        kind: the class of the configuration.
        values: the content of ``config.json``.
    """
    saved = saved_from(values)
    built = auto._model_mapping.get(kind, ())
    classes = built if isinstance(built, tuple) else (built,)
    if auto_class_for(saved) != auto.__name__ or saved in [c.__name__ for c in classes]:
        return None
    named = getattr(library(), saved, None)
    return named if getattr(named, "config_class", None) is kind else None


def loading_class(config: Mapping[str, Any]) -> str:
    """Return the class that opens a directory as it was saved: an auto class if one does.

    Args:
        config: the content of its ``config.json``.
    """
    saved = saved_from(config)
    name = auto_class_for(saved)
    try:
        package = library()
        kind = package.CONFIG_MAPPING[config["model_type"]]
        unmapped = unmapped_class(getattr(package, name), kind, config)
    except (SpecError, LookupError, AttributeError):  # the library does not know it
        return name
    return name if unmapped is None else saved


def fitting_class(saved: str) -> str:
    """Return the advice which auto class opens what was saved from a class."""
    name = auto_class_for(saved)
    if saved and hasattr(library(), name):
        return f"use transformers.{name}: it was saved from {saved}"
    return f"it was saved from {saved}" if saved else "see the model's page for its class"
