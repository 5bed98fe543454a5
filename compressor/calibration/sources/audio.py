"""WAV files in a folder, as waveforms or as the features of a model's own extractor."""

from __future__ import annotations

import json
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compressor.calibration.sources.class_folders import ClassFolderSource, Item
from compressor.calibration.sources.file_source import Header, ReadAt
from compressor.calibration.sources.waveforms import WaveForm, read_wave, resampled, wave_form
from compressor.errors import DataError, SpecError
from compressor.types.tensors import Array, Batch

_CONFIG = "preprocessor_config.json"
_ARRAY = "audio"


class WavFolderSource(ClassFolderSource):
    """A folder of WAV files, or one of class folders with WAV files in them.

    The arrays are ``audio``, float32 from -1 to 1, ``[samples, length]``, and where there are class
    folders ``label``, int64 ``[samples]``, as for `images`. With ``preprocessor``, the feature
    extractor that the model of ``transformers`` comes with makes the arrays instead, such as
    ``input_features`` (log-mel) or ``input_values``. Files come sorted by name; ``samples`` takes
    that many spread evenly over all of them.

    Files hold integers of 8 to 32 bits or floats, and are resampled if their rate is another.
    """

    kind: ClassVar[str] = "folder of WAV files"
    files_are: ClassVar[str] = "WAV files"
    suffixes: ClassVar[frozenset[str]] = frozenset((".wav", ".wave"))
    says_how: ClassVar[frozenset[str]] = frozenset(("rate", "mono", "length", "preprocessor"))

    rate: int | None = Field(
        default=None,
        ge=1,
        description="samples per second; default: the first file's, or the preprocessor's",
    )
    mono: bool = Field(
        default=True,
        description="mix channels to one, their mean; with false arrays are [samples, channels, "
        "length], and all files have as many channels",
    )
    length: int | None = Field(
        default=None,
        ge=1,
        description="samples of each array: longer ones are cut, and shorter ones zero-padded, at "
        "the end, like the preprocessor does",
    )
    preprocessor: Path | None = Field(
        default=None,
        strict=False,
        description="folder of the model with preprocessor_config.json, whose feature extractor "
        "needs the package transformers; without rate and length, default the model's own folder",
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        if self.preprocessor is None and self.length is None:
            raise ValueError("sounds may differ in length; give length in samples, or preprocessor")
        if self.preprocessor is not None and not self.mono:
            raise ValueError("has mono: false beside preprocessor; leave mono out")
        return self

    @classmethod
    def completed(cls, options: dict[str, Any], model: Path) -> dict[str, Any]:
        """Return a spec's options, with the model's extractor if they say nothing about sizes."""
        if not {"rate", "length", "preprocessor"}.isdisjoint(options):
            return options
        found = extractor_file(model)
        return options if found is None else {**options, "preprocessor": str(model)}

    def forms(self, items: list[Item]) -> dict[str, Header]:
        """Return the headers of the arrays."""
        batch = self._arrays(items[0][0], silent=True)
        return {n: Header((len(items), *a.shape[1:]), a.dtype) for n, a in batch.items()}

    def preparation(self) -> tuple[Any, str]:
        """Return the settings that make the arrays, and a description of them."""
        rate = f"{self._rate:,} samples a second"
        if self.preprocessor is not None:
            file = extractor_file(self.preprocessor)
            text = "" if file is None else file.read_text(encoding="utf-8")
            return [text, self.length, self._rate], f"{rate}, features as {file} has them"
        assert self.length is not None
        mixed = "one channel" if self.mono else "all channels"
        words = f"{rate}, {mixed}, {self.length:,} samples ({self.length / self._rate:.2f} s)"
        return [self.length, self._rate, self.mono], words

    def readers(self, items: list[Item]) -> dict[str, ReadAt]:
        """Return how sounds are read."""

        def reader(name: str) -> ReadAt:
            def read(rows: NDArray[np.int64]) -> Array:
                made = [self._arrays(items[row][0])[name] for row in rows.tolist()]
                form = forms[name]
                return np.concatenate([*made, np.empty((0, *form.shape[1:]), form.dtype)])

            return read

        forms = self.forms(items)
        return {name: reader(name) for name in forms}

    def _arrays(self, path: Path, *, silent: bool = False) -> Batch:
        """Return the arrays of one file, each ``[1, ...]``; of silence, if that is enough."""
        sound = self._sound(path, silent=silent)
        if self.preprocessor is None:
            assert self.length is not None
            kept = sound[:, : self.length]
            padded = np.pad(kept, ((0, 0), (0, self.length - kept.shape[1])))
            return {_ARRAY: padded if self.mono else padded[None]}
        fixed = {} if self.length is None else {"max_length": self.length}
        padding = {**fixed, "padding": "max_length", "truncation": True}
        try:
            made = self._extractor(
                sound[0], sampling_rate=self._rate, return_tensors="np", **padding
            )
        except (TypeError, ValueError) as error:
            subject = f"preprocessor '{self.preprocessor}'"
            remedy = "set length in samples" if self.length is None else "set another length"
            raise DataError(subject, f"makes no arrays ({error})", remedy) from error
        wide = {np.dtype(np.float64): np.float32, np.dtype(np.int32): np.int64}
        return {n: np.asarray(a, wide.get(a.dtype, a.dtype)) for n, a in made.items()}

    def _sound(self, path: Path, *, silent: bool = False) -> Array:
        """Return what a file holds at the rate that is wanted, ``[channels, samples]``."""
        try:
            if silent:
                return np.zeros((1 if self.mono else self._channels, self._rate), np.float32)
            seconds = None
            if self.length is not None and self.preprocessor is None:
                seconds = (self.length + 64) / self._rate + 0.1
            sound, rate = read_wave(path, seconds)
            if not sound.size:
                raise ValueError("has no samples")
        except (OSError, ValueError, struct.error) as error:
            problem = f"cannot be read: {error}"
            raise DataError(f"sound '{path}'", problem, "replace or remove it") from error
        if self.mono:
            sound = sound.mean(axis=0, keepdims=True, dtype=np.float32)
        elif len(sound) != self._channels:
            problem = f"has {len(sound)} channels, and the first file {self._channels}"
            raise DataError(f"sound '{path}'", problem, "set mono: true, or replace it")
        return resampled(sound, rate, self._rate)

    @cached_property
    def _channels(self) -> int:
        return self._first.channels

    @cached_property
    def _first(self) -> WaveForm:
        return form_of(self._items()[0][0])

    @cached_property
    def _rate(self) -> int:
        if self.preprocessor is not None:
            own = int(self._extractor.sampling_rate)
            if self.rate not in (None, own):
                problem = f"has rate: {self.rate}, and its preprocessor takes {own}"
                raise SpecError(self.subject, problem, "leave rate out; files are resampled")
            return own
        return self.rate or self._first.rate

    @cached_property
    def _extractor(self) -> Any:
        """The model's feature extractor, which runs no code of the folder."""
        assert self.preprocessor is not None
        subject = f"preprocessor '{self.preprocessor}'"
        file = extractor_file(self.preprocessor)
        if file is None:
            problem = f"has no {_CONFIG} that names a feature extractor of sound"
            raise SpecError(subject, problem, "set rate and length instead")
        try:
            import transformers
        except ImportError as error:
            remedy = "install it, or set rate and length instead"
            raise SpecError(subject, "needs the package transformers", remedy) from error
        name = json.loads(file.read_text(encoding="utf-8"))["feature_extractor_type"]
        cls = getattr(transformers, name, None)
        if cls is None or not issubclass(cls, transformers.SequenceFeatureExtractor):
            problem = f"names {name!r}, which transformers does not have for sound"
            raise DataError(subject, problem, "set rate and length instead")
        try:
            return cls.from_json_file(file)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(subject, f"cannot be used ({error})", "download it again") from error


def form_of(path: Path) -> WaveForm:
    """Return the header of a sound.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return wave_form(path)
    except (ValueError, struct.error) as error:
        problem = f"cannot be read: {error}"
        raise DataError(f"sound '{path}'", problem, "replace or remove it") from error


def extractor_file(place: Path) -> Path | None:
    """Return the file in a model's folder that names an extractor of sound, if there is one.

    Raises:
        DataError: it is damaged.
    """
    path = place if place.is_file() else place / _CONFIG
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read ({error})"
        raise DataError(f"preprocessor '{path}'", problem, "download it again") from error
    named = value.get("feature_extractor_type") if isinstance(value, dict) else None
    of_sound = isinstance(named, str) and "sampling_rate" in value
    return path if of_sound else None
