"""How a directory of sentence-transformers makes one vector of those of a text's tokens.

``modules.json`` lists what follows the network; without it, the vector is the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import ModelError, SpecError, printable
from compressor.files import file_sha256, json_sha256, read_json
from compressor.models.checkpoint.folder import CONFIG, MODULES
from compressor.models.checkpoint.weight_files import read_weights, weight_file_paths
from compressor.types.tensors import Array

_VECTOR = "sentence_embedding"
_IGNORED = ("Transformer", "Normalize", "Dropout")  # a vector's length does not turn it
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older files, in the order in which several vectors are joined."""
_WORDS = {
    "cls": "that of its first token",
    "max": "the largest of its tokens' values",
    "mean": "the mean over its tokens",
    "mean_sqrt_len_tokens": "the mean over its tokens",
    "weightedmean": "the mean over its tokens, of which later ones weigh more",
    "lasttoken": "that of its last token",
}
_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {"Identity": np.asarray, "Tanh": np.tanh}


@dataclass(frozen=True, eq=False)
class Pooling:
    """What makes a text's vector, but for its length.

    Attributes:
        modes: of the vectors that are joined, by the names of sentence-transformers.
        layers: what follows them, one after another.
        digest: of all that decides the vector.
    """

    modes: tuple[str, ...] = ("mean",)
    layers: tuple[Callable[[Array], Array], ...] = ()
    digest: str = ""

    def vectors(self, tokens: Array) -> Array:
        """Return a vector of each text.

        Args:
            tokens: float64 ``[N, tokens, width]``, zeros where a token does not count.

        Returns:
            float64 ``[N, width of the vector]``.
        """
        counted = np.asarray(tokens.any(axis=-1, keepdims=True))
        vectors = np.concatenate([_pooled(mode, tokens, counted) for mode in self.modes], axis=-1)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors

    def words(self) -> str:
        """Return what a text's vector is."""
        joined = ", joined with ".join(_WORDS[mode] for mode in self.modes)
        return f"{joined}, through the layers that follow" if self.layers else joined


def _pooled(mode: str, tokens: Array, counted: Array) -> Array:
    """Return one vector of each text, ``[N, width]``.

    Args:
        counted: which tokens count, ``[N, tokens, 1]``.
    """
    length = tokens.shape[1]
    first = counted.argmax(axis=1, keepdims=True)
    if mode in ("cls", "lasttoken"):
        place = first if mode == "cls" else length - 1 - counted[:, ::-1].argmax(1, keepdims=True)
        return np.asarray(np.take_along_axis(tokens, place, axis=1)[:, 0])
    if mode == "max":
        least = np.where(counted.any(axis=1, keepdims=True), -np.inf, 0.0)
        return np.asarray(np.where(counted, tokens, least).max(axis=1))
    later = np.arange(1, length + 1)[:, None] - first if mode == "weightedmean" else 1.0
    weights = counted * later
    total = np.maximum(weights.sum(axis=1), 1.0)
    total = np.sqrt(total) if mode == "mean_sqrt_len_tokens" else total
    return np.asarray((tokens * weights).sum(axis=1) / total)


def pools(folder: Path) -> bool:
    """Return whether a directory is said to make one vector of those of a text's tokens."""
    return (folder / MODULES).is_file() and any(name == "Pooling" for name, _ in _modules(folder))


def pooling_of(folder: Path) -> Pooling:
    """Return how a directory makes a text's vector.

    Raises:
        SpecError: by a module whose result is not computed here.
        ModelError: a file of it is malformed or missing.
    """
    if not (folder / MODULES).is_file():
        return Pooling()
    modes: tuple[str, ...] = ("mean",)
    layers: list[Callable[[Array], Array]] = []
    read: list[Any] = []
    for name, place in _modules(folder):
        if name in _IGNORED:
            continue
        config = _json(folder / place / CONFIG)
        config = config if isinstance(config, dict) else {}
        if name == "Pooling" and not layers:
            modes = _modes(config, place)
        elif name == "Dense":
            layers.append(_dense(folder / place, config))
            read.append([config, [file_sha256(p) for p in weight_file_paths(_file(folder, place))]])
        else:
            raise _refused(place, name)
    usual = not layers and modes == ("mean",)
    return Pooling(modes, tuple(layers), "" if usual else json_sha256([modes, read]))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the name of each module's class, and its folder."""
    entries = _json(folder / MODULES)
    named = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    return [(str(e.get("type")).rpartition(".")[2], str(e.get("path", ""))) for e in named]


def _modes(config: Mapping[str, Any], place: str) -> tuple[str, ...]:
    stated = config.get("pooling_mode")
    if stated is None:
        stated = [mode for key, mode in _FLAGS.items() if config.get(key)] or "mean"
    modes = tuple(map(str, stated)) if isinstance(stated, list) else (str(stated),)
    for mode in modes:
        if mode not in _WORDS:
            raise _refused(place, f"pooling_mode {mode!r}")
    return modes


def _dense(folder: Path, config: Mapping[str, Any]) -> Callable[[Array], Array]:
    """Return a layer with an activation, of vectors ``[N, width]``."""
    stated = str(config.get("activation_function", "torch.nn.Tanh"))
    activation = _ACTIVATIONS.get(stated.rpartition(".")[2])
    source = config.get("module_input_name") or _VECTOR
    target = config.get("module_output_name") or source
    if activation is None or config.get("use_residual") or (source, target) != (_VECTOR, _VECTOR):
        raise _refused(folder.name, f"a Dense with {stated}")
    tensors = read_weights(_file(folder.parent, folder.name))
    weight, bias = (tensors.get(f"linear.{name}") for name in ("weight", "bias"))
    if weight is None:
        raise ModelError(f"module {str(folder)!r}", "has no linear.weight", "save the model again")
    matrix = weight.double().numpy().T
    added = 0.0 if bias is None else bias.double().numpy()
    return lambda vectors: activation(vectors @ matrix + added)


def _file(folder: Path, place: str) -> Path:
    """Return a module's weights as sentence-transformers takes them: safetensors first."""
    own, pickled = folder / place / "model.safetensors", folder / place / "pytorch_model.bin"
    return pickled if pickled.is_file() and not own.is_file() else own


def _json(path: Path) -> Any:
    return read_json(path, f"file {str(path)!r}", "is malformed", constants=True)


def _refused(place: str, what: str) -> SpecError:
    return SpecError(
        "metric 'embedding'",
        f"does not compute the vector of this model: {printable(place)!r} of modules.json is "
        f"{printable(what)}",
        "use cosine, which compares the vectors of tokens, or a metric of your own",
    )
