"""The source of WAV files: reading, resampling, features of a model's own extractor."""

from __future__ import annotations

import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressor.calibration.sources.audio import WavFolderSource
from compressor.calibration.sources.waveforms import read_wave, resampled
from compressor.errors import DataError, SpecError
from compressor.types.tensors import TensorSpec


def sine(hertz: float, rate: int, seconds: float = 0.25) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate) * 0.5


def save(path: Path, sound: np.ndarray, rate: int = 8000) -> Path:
    """Write ``[samples]`` or ``[channels, samples]`` as 16 bits, by the standard library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = np.atleast_2d(sound)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.rint(channels.T * 32768).clip(-32768, 32767).astype("<i2").tobytes())
    return path


def riff(tag: int, bits: int, data: bytes, *, extensible: bool = False) -> bytes:
    """Return a WAV file of one channel with a chunk of odd length before its sound."""
    head = struct.pack("<HHIIHH", tag, 1, 8000, 8000 * bits // 8, bits // 8, bits)
    if extensible:
        head = struct.pack("<H", 0xFFFE) + head[2:]
        head += struct.pack("<HHIH", 22, bits, 0, tag) + bytes(14)
    parts = b"WAVE" + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    parts += b"fmt " + struct.pack("<I", len(head)) + head
    parts += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(parts)) + parts


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(
    ("tag", "bits", "data"),
    [
        (1, 8, bytes([0, 192, 128])),
        (1, 16, struct.pack("<3h", -32768, 16384, 0)),
        (1, 24, b"\x00\x00\x80" + b"\x00\x00\x40" + b"\0\0\0"),
        (1, 32, struct.pack("<3i", -(1 << 31), 1 << 30, 0)),
        (3, 32, struct.pack("<3f", -1, 0.5, 0)),
        (3, 64, struct.pack("<3d", -1, 0.5, 0)),
    ],
)
def test_every_form_of_samples(tmp_path, tag, bits, data, extensible):
    path = tmp_path / "a.wav"
    path.write_bytes(riff(tag, bits, data, extensible=extensible))
    sound, rate = read_wave(path)
    assert (rate, sound.dtype, sound.tolist()) == (8000, np.float32, [[-1.0, 0.5, 0.0]])


def test_a_recording_that_was_cut_off_gives_what_is_there(tmp_path):
    path = save(tmp_path / "a.wav", sine(100, 8000))
    whole = path.read_bytes()
    path.write_bytes(whole[: 44 + 101])
    sound, _ = read_wave(path)
    assert sound.shape == (1, 50)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no WAV file"),
        (b"RIFF\0\0\0\0WAVE", "has no sound"),
        (riff(1, 12, b"\0\0"), "format 1 with 12 bits"),
        (riff(7, 8, b"\0\0"), "format 7 with 8 bits"),
        (riff(1, 16, b""), "has no samples"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "has sound before its format"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, content, message):
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.wav': cannot be read: .*{message}"):
        list(WavFolderSource(path=tmp_path, length=4).batches(1))


@pytest.mark.parametrize(("rate", "wanted"), [(22050, 16000), (8000, 16000), (48000, 8000)])
def test_resampling_keeps_a_tone_and_removes_what_is_too_high(rate, wanted):
    made = resampled(sine(440, rate)[None].astype(np.float32), rate, wanted)[0]
    expected = sine(440, wanted)
    assert len(made) == len(expected)
    middle = slice(100, -100)
    # measured: 1.2e-4 to 4e-4 by the pair of rates; a wrong phase or gain gives 1e-2 at least
    np.testing.assert_allclose(made[middle], expected[middle], atol=1e-3)
    if wanted < rate:
        high = resampled(sine(wanted * 0.7, rate)[None].astype(np.float32), rate, wanted)[0]
        assert np.abs(high[middle]).max() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "wanted"), [(22050, 16000), (8000, 16000), (44100, 16000)])
def test_torchaudio_gives_the_same(rate, wanted):
    functional = pytest.importorskip("torchaudio.functional")
    torch = pytest.importorskip("torch")
    noise = np.random.default_rng(0).normal(size=(2, 9000)).astype(np.float32)
    expected = functional.resample(torch.from_numpy(noise), rate, wanted).numpy()
    # measured: 4.5e-5 where rates have few common factors, since its filters are float32
    np.testing.assert_allclose(resampled(noise, rate, wanted), expected, atol=1e-4)


def test_class_folders_of_sounds(tmp_path):
    save(tmp_path / "yes" / "a.wav", np.full(5, 0.5))
    save(tmp_path / "no" / "b.WAV", np.full((2, 30), [[0.25], [0.75]]))
    source = WavFolderSource(path=tmp_path, length=8)
    assert source.info().fields == (
        TensorSpec("audio", ("batch", 8), "float32"),
        TensorSpec("label", ("batch",), "int64"),
    )
    (batch,) = source.batches(4)
    assert batch["label"].tolist() == [0, 1]
    assert batch["audio"].tolist() == [[0.5] * 8, [0.5] * 5 + [0.0] * 3]
    assert "8,000 samples a second, one channel, 8 samples" in source.described()
    assert source.take(np.array([1]))["label"].tolist() == [1]
    one = WavFolderSource(path=tmp_path, length=8, classes={"yes": 0, "no": 1})
    assert one.digest() != source.digest()


def test_channels_stay_where_they_are_asked_for(tmp_path):
    save(tmp_path / "a.wav", np.array([[0.5] * 6, [0.25] * 6]))
    source = WavFolderSource(path=tmp_path, length=4, mono=False)
    (batch,) = source.batches(1)
    assert batch["audio"].tolist() == [[[0.5] * 4, [0.25] * 4]]
    save(tmp_path / "b.wav", np.zeros(6))
    with pytest.raises(DataError, match=r"b\.wav': has 1 channels, and the first file 2"):
        list(source.batches(1))


def test_files_come_at_one_rate(tmp_path):
    save(tmp_path / "a.wav", sine(440, 16000), 16000)
    save(tmp_path / "b.wav", sine(440, 8000), 8000)
    (batch,) = WavFolderSource(path=tmp_path, length=3000).batches(2)
    inside = slice(50, None)  # before a file begins it is silent, which is heard for six crossings
    np.testing.assert_allclose(batch["audio"][0, inside], batch["audio"][1, inside], atol=1e-3)
    (slow,) = WavFolderSource(path=tmp_path, length=1500, rate=8000).batches(2)
    np.testing.assert_array_equal(slow["audio"][1], read_wave(tmp_path / "b.wav")[0][0, :1500])


@pytest.mark.parametrize(
    ("name", "options", "length"),
    [
        ("WhisperFeatureExtractor", {"chunk_length": 1, "feature_size": 8}, None),
        ("Wav2Vec2FeatureExtractor", {"return_attention_mask": True}, 4000),
    ],
)
def test_features_are_those_of_the_models_extractor(tmp_path, name, options, length):
    transformers = pytest.importorskip("transformers")
    extractor = getattr(transformers, name)(**options)
    extractor.save_pretrained(tmp_path)
    folder = tmp_path / "sounds"
    save(folder / "a.wav", sine(440, 16000), 16000)
    save(folder / "b.wav", sine(300, 16000, 0.4), 16000)
    source = WavFolderSource(path=folder, preprocessor=tmp_path, length=length)
    (batch,) = source.batches(2)
    sounds = [read_wave(folder / name)[0][0] for name in ("a.wav", "b.wav")]
    more: dict[str, Any] = {} if length is None else {"max_length": length}
    expected = extractor(
        sounds, sampling_rate=16000, return_tensors="np", padding="max_length", truncation=True,
        **more,
    )  # fmt: skip
    assert batch.keys() == expected.keys()
    for array in expected:
        np.testing.assert_allclose(batch[array], expected[array], atol=1e-5)
    shapes = {s.name: s.shape[1:] for s in source.info().fields}
    assert shapes == {n: a.shape[1:] for n, a in batch.items()}


def test_what_does_not_fit(tmp_path):
    with pytest.raises(SpecError, match="give length in samples, or preprocessor"):
        WavFolderSource(path=tmp_path)
    save(tmp_path / "a.wav", np.zeros(9))
    with pytest.raises(SpecError, match="that names a feature extractor of sound"):
        WavFolderSource(path=tmp_path, preprocessor=tmp_path).info()
    config = tmp_path / "preprocessor_config.json"
    config.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        WavFolderSource(path=tmp_path, preprocessor=tmp_path).info()
    config.write_text(json.dumps({"feature_extractor_type": "AutoModel", "sampling_rate": 8000}))
    with pytest.raises(DataError, match="names 'AutoModel', which transformers does not have"):
        WavFolderSource(path=tmp_path, preprocessor=tmp_path).info()
    (tmp_path / "a.wav").unlink()
    with pytest.raises(DataError, match="has no WAV files"):
        WavFolderSource(path=tmp_path, length=4).info()


def test_rates_without_a_common_divisor_are_resampled_with_few_weights_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = np.random.default_rng(0).standard_normal((2, 500)).astype(np.float32)
    kept = resampled(sound, 8000, 7999)  # a table of 7,999 phases
    monkeypatch.setattr("compressor.calibration.sources.waveforms._AT_ONCE", 1000)
    np.testing.assert_array_equal(resampled(sound, 8000, 7999), kept)


@pytest.mark.parametrize("rate", [99, 10_000_001])
def test_a_rate_that_no_recorder_has_is_refused(tmp_path: Path, rate: int) -> None:
    path = tmp_path / "one.wav"
    with wave.open(str(path), "wb") as sound:
        sound.setparams((1, 2, rate, 0, "NONE", ""))
        sound.writeframes(bytes(20))
    with pytest.raises(ValueError, match=f"has {rate:,} samples a second"):
        read_wave(path)
