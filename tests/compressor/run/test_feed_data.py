"""Data of whole feeds and states: how they begin, how many are taken, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from compressor.errors import CompressorError
from tests.compressor.voice import WIDTH, Voice, clip

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def voice(tmp_path: Path) -> Voice:
    return Voice(tmp_path)


def for_clips(change: Callable[[Arrays], object]) -> Callable[[Voice], None]:
    def changed(voice: Voice) -> None:
        for path in (voice.folder / "calibration").iterdir():
            arrays = dict(np.load(path))
            change(arrays)
            np.savez(path, **arrays)  # type: ignore[arg-type]

    return changed


def for_data(**keys: Any) -> Callable[[Voice], None]:
    def changed(voice: Voice) -> None:
        entry = voice.spec["data"]["calibration"]
        entry.update(keys)
        for key in [key for key, value in keys.items() if value is None]:
            del entry[key]

    return changed


def stacked(voice: Voice) -> None:
    for_data(npz="all.npz", samples=None, state=None)(voice)
    arrays = {"input": np.zeros((8, 512), np.float32), "sr": np.full(8, 16000)}
    np.savez(voice.folder / "all.npz", **arrays, state=np.zeros((8, 2, WIDTH), np.float32))  # type: ignore[arg-type]


def with_one(**arrays: Any) -> Callable[[Voice], None]:
    """Change the arrays of one file alone, which is not the first."""
    return lambda voice: np.savez(voice.folder / "calibration/03.npz", **{**clip(3), **arrays})


def training(voice: Voice) -> None:
    stacked(voice)
    voice.spec["data"] = {"training": voice.spec["data"]["calibration"]}


def without_rate(voice: Voice) -> None:
    path = voice.folder / "calibration/03.npz"
    np.savez(path, input=clip(3)["input"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            for_clips(lambda arrays: arrays.update(sr=np.array([16000]))),
            "calibration data: has a sequence whose arrays have different numbers of steps: "
            "'input' [4, 1, 512], 'sr' [1]; give each array that changes as [steps, ...], before "
            "the axes of input float32[batch, 512], and one that does not without that axis",
        ),
        (
            for_clips(lambda arrays: arrays.update(sr=np.array(16000, np.int32))),
            "calibration data, input 'sr': dtype is int32, the model expects int64; save it as the "
            "model takes it, or convert it in a transform",
        ),
        (
            for_clips(lambda arrays: arrays.pop("sr")),
            "calibration data: has no array for the model's input 'sr'; put it into every feed, or "
            "name the output that it comes from under state",
        ),
        (
            without_rate,
            "calibration/03.npz': holds input float32[?, ?, ?], and the first feed holds input "
            "float32[?, ?, ?], sr int64[]; give the arrays of all feeds the same names, ranks and "
            "dtypes",
        ),
        (
            for_clips(lambda arrays: arrays.update(input=arrays["input"][0])),
            "calibration data: has no steps: 'input' [1, 512], 'sr' []; give each array that ",
        ),
        (
            for_data(state=None),
            "calibration data, input 'input': shape is [4, 1, 512], the model expects input "
            "float32[batch, 512]; save each of its rows as a feed of its own; only with state are "
            "they steps",
        ),
        (
            stacked,
            "calibration data: cannot be stacked: the model's input state float32[2, batch, 64] "
            "does not begin with an axis for samples; add samples: feeds, and give each sample as "
            "a whole feed, in a file of a folder",
        ),
        (
            for_data(state={"stat": "stateN"}),
            "state 'stat': 'stat' is not an input of the model; did you mean 'state'?",
        ),
        (
            for_data(state={"state": "stateM"}),
            "state 'state': 'stateM' is not an output of the model; did you mean 'stateN'?",
        ),
        (
            for_data(state={"state": "prob"}),
            "state 'state': is state float32[2, batch, 64], and the output that it takes is prob "
            "float32[batch, 1]; name the output that is the next step's state",
        ),
        (
            with_one(input=np.zeros((4, 1, 500), np.float32)),
            "03.npz of calibration data, input 'input': shape is [1, 500], the model expects input "
            "float32[batch, 512]; save it as the model takes it",
        ),
        (
            with_one(sr=np.zeros(3, np.int64)),
            "03.npz': holds input float32[?, ?, ?], sr int64[?], and the first feed holds",
        ),
        (
            training,
            "training data: cannot be stacked: the model's input state float32[2, batch, 64] "
            "does not begin with an axis for samples; leave out data.training and the passes that "
            "train, which need",
        ),
        (for_data(batch=4), "leave batch out: the model takes one feed at a time"),
        (
            for_data(samples=None, state=None),
            "is a folder; name an npz file, or add samples: feeds to take each file in it as one",
        ),
        (for_data(samples=3), "add samples: feeds, which state needs"),
        (for_data(samples=3, state=None, feeds=2), "add samples: feeds, which feeds needs"),
        (for_data(samples="feed"), 'is "feed"; give a number, or feeds'),
        (
            for_data(npz=None, images="calibration"),
            "is 'feeds' for calibration from images; feeds come from npz or factory",
        ),
        (
            lambda voice: [p.unlink() for p in (voice.folder / "calibration").iterdir()],
            "holds no npz files; save each feed with numpy.savez",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused_by_the_plan(
    voice: Voice, change: Callable[[Voice], object], message: str
):
    change(voice)
    with pytest.raises(CompressorError) as refused:
        voice.plan()
    assert message in str(refused.value)


def test_feeds_are_bounded_by_their_number(voice: Voice):
    for_data(feeds=2)(voice)
    assert voice.plan().data["calibration"].samples == 2
    for path in sorted((voice.folder / "calibration").iterdir())[2:]:
        path.write_bytes(b"never read")
    calibration = voice.plan().data["calibration"]
    assert len(list(calibration.batches())) == 2


def test_a_state_starts_as_the_data_say(voice: Voice):
    first = np.full((2, 1, WIDTH), 0.25, np.float32)
    for_clips(lambda arrays: arrays.update(state=first))(voice)
    plan = voice.plan()
    feed = plan.data["calibration"].first(1)
    np.testing.assert_array_equal(feed["state"], first)
