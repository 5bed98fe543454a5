"""Sound in WAV files: reading, resampling, mixing to one channel."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path
from typing import IO

import numpy as np

from compressor.types.tensors import Array

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MOST = 1 << 30  # bytes of sound that are read from one file
_CROSSINGS = 6  # zero crossings of the filter on each side
_ROLLOFF = 0.99  # where it cuts off, of the highest frequency that both rates have
_AT_ONCE = 1 << 20  # weights of samples that are resampled at once
_RATES = range(100, 10_000_001)  # samples a second: from slow sensors to ultrasound


@dataclass(frozen=True)
class WaveForm:
    """The header of a WAV file.

    Attributes:
        rate: samples a second.
        start: where the sound begins, in bytes.
        size: its bytes.
    """

    tag: int
    channels: int
    rate: int
    bits: int
    start: int
    size: int

    @property
    def length(self) -> int:
        """How many samples each channel has."""
        return self.size // (self.channels * self.bits // 8)


def wave_form(path: Path) -> WaveForm:
    """Read the header of a WAV file (RIFF, Microsoft and IBM, 1991).

    Raises:
        ValueError: it is none, or its sound is neither integers of 8 to 32 bits nor floats.
    """
    with path.open("rb") as stream:
        return _header(stream, path.stat().st_size)


def _header(stream: IO[bytes], whole: int) -> WaveForm:
    start = stream.read(12)
    if start[:4] != b"RIFF" or start[8:] != b"WAVE":
        raise ValueError("is no WAV file")
    format_: tuple[int, int, int, int] | None = None
    while len(head := stream.read(8)) == 8:
        name, size = head[:4], struct.unpack("<I", head[4:])[0]
        if name == b"data":
            if format_ is None:
                raise ValueError("has sound before its format")
            place = stream.tell()
            # A recording that was cut off says more than there is, and one of a stream the most.
            return WaveForm(*format_, place, min(size, whole - place))
        if name == b"fmt " and 16 <= size <= 1 << 10:
            format_ = _format(stream.read(size))
            stream.seek(size % 2, 1)
        else:
            stream.seek(size + size % 2, 1)
    raise ValueError("has no sound")


def _format(part: bytes) -> tuple[int, int, int, int]:
    if len(part) < 16:
        raise ValueError("ends early")
    tag, channels, rate, _, _, bits = struct.unpack("<HHIIHH", part[:16])
    if tag == _EXTENSIBLE and len(part) >= 26:
        tag = struct.unpack("<H", part[24:26])[0]
    known = (tag == _PCM and bits in (8, 16, 24, 32)) or (tag == _FLOAT and bits in (32, 64))
    if not known or not channels or not rate:
        raise ValueError(f"holds sound of format {tag} with {bits} bits in {channels} channels")
    if rate not in _RATES:
        raise ValueError(f"says that it has {rate:,} samples a second")
    return tag, channels, rate, bits


def read_wave(path: Path, seconds: float | None = None) -> tuple[Array, int]:
    """Return the sound of a WAV file, float32 ``[channels, samples]``, and its samples a second.

    Integers of ``b`` bits are divided by ``2 ** (b - 1)``, so that all are from -1 to 1.

    Args:
        seconds: how much is read, from the start.

    Raises:
        ValueError: as :func:`wave_form`, or it is too long.
    """
    form = wave_form(path)
    frame = form.channels * form.bits // 8
    frames = form.length if seconds is None else min(form.length, ceil(seconds * form.rate))
    if frames * frame > _MOST:
        raise ValueError(f"has {frames * frame >> 20:,} MiB of sound")
    with path.open("rb") as stream:
        stream.seek(form.start)
        data = stream.read(frames * frame)
    data = data[: len(data) // frame * frame]
    values = _values(data, form.tag, form.bits).reshape(-1, form.channels)
    return np.ascontiguousarray(values.T, np.float32), form.rate


def _values(data: bytes, tag: int, bits: int) -> Array:
    if tag == _FLOAT:
        return np.frombuffer(data, f"<f{bits // 8}")
    if bits == 8:  # the only unsigned one
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if bits == 24:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.reshape(-1).view("<i4") / np.float64(1 << 31)
    return np.frombuffer(data, f"<i{bits // 8}") / np.float64(1 << (bits - 1))


def resampled(sound: Array, rate: int, wanted: int) -> Array:
    """Return sound at another rate, float32 ``[channels, ceil(samples * wanted / rate)]``.

    Band-limited interpolation (J. O. Smith, Digital Audio Resampling, 2002): each sample is a sum
    of those around it, weighted by a sinc that a squared cosine ends after six zero crossings.

    >>> resampled(np.ones((1, 8), np.float32), 8, 4).shape
    (1, 4)

    Args:
        sound: ``[channels, samples]``.
        rate: its samples a second.
    """
    if rate == wanted:
        return sound
    down, up = (n // gcd(rate, wanted) for n in (rate, wanted))
    cut = _ROLLOFF * min(1.0, up / down)  # of the given rate's highest frequency
    reach = ceil(_CROSSINGS / cut)
    width = 2 * reach + 1
    # Sample m lies at m * down / up; its weights depend on the fraction, m modulo `up`.
    few = up * width <= _AT_ONCE
    table = _weights(np.arange(up) * down % up / up, cut, reach) if few else None
    count = -(-sound.shape[1] * up // down)
    padded = np.pad(sound, ((0, 0), (reach, reach + 1)))
    around = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
    made = np.empty((len(sound), count), np.float32)
    step = max(1, _AT_ONCE // width)
    for start in range(0, count, step):
        samples = np.arange(start, min(start + step, count))
        taps = around[:, samples * down // up]
        if table is None:
            weights = _weights(samples * down % up / up, cut, reach)
        else:
            weights = table[samples % up]
        made[:, samples] = np.einsum("cst,st->cs", taps, weights)
    return made


def _weights(fractions: Array, cut: float, reach: int) -> Array:
    """Return the weights of the surrounding samples, ``[fractions, 2 * reach + 1]``."""
    offsets = fractions[:, None] - np.arange(-reach, reach + 1)
    places = np.clip(offsets * cut, -_CROSSINGS, _CROSSINGS)
    window = np.cos(places * np.pi / (2 * _CROSSINGS)) ** 2
    weights: Array = (np.sinc(offsets * cut) * window * cut).astype(np.float32)
    return weights
