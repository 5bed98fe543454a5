"""The walks of the guide: what the page shows is run, in its order."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from compressor.cli.application import application
from compressor.errors import ExitCode
from compressor.run.timing import cold_rounds
from tests.compressor.brief_timing import time_briefly
from tests.docs.test_docs import ROOT

PAGE = ROOT / "docs" / "walks.md"


def clips(folder: Path) -> None:
    """Make clips of voice-like sound: harmonics under three formants, with pauses."""
    (folder / "clips").mkdir()
    for i in range(6):
        rng = np.random.default_rng(i)
        sound = 0.005 * rng.standard_normal(2 * 16_000)
        for start in range(4_000, 28_000, 6_000):
            time = np.arange(4_500) / 16_000
            pitch, formants = rng.uniform(90, 220), rng.uniform([300, 900, 2300], [800, 2200, 3000])
            for harmonic in pitch * np.arange(1, 30):
                loud = sum(1 / (1 + ((harmonic - f) / 120) ** 2) for f in formants)
                wave_form = np.sin(2 * np.pi * harmonic * time) * np.hanning(len(time))
                sound[start : start + len(time)] += 0.1 * loud * wave_form
        with wave.open(str(folder / "clips" / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes((sound.clip(-1, 1) * 32_767).astype(np.int16).tobytes())


def pages(folder: Path) -> None:
    """Make small pictures with some lines of text."""
    from PIL import Image, ImageDraw, ImageFont

    words = ["invoice", "total", "street", "coffee", "number", "please", "return", "Monday"]
    (folder / "pages").mkdir()
    for i in range(4):
        rng = np.random.default_rng(i)
        page = Image.new("RGB", (320, 320), (235 - 10 * i,) * 3)
        for line in range(8):
            text = " ".join(rng.choice(words, 3))
            font = ImageFont.load_default(size=18 + (i + line) % 5)
            ImageDraw.Draw(page).text((8 + 4 * i, 12 + 38 * line), text, (20, 30, 60), font)
        page.save(folder / "pages" / f"{i}.png")


def nothing(folder: Path) -> None:
    del folder


@dataclass(frozen=True)
class Walk:
    """A walk's title, the packages that it needs, its data, and the runs that it leaves."""

    title: str
    packages: tuple[str, ...]
    data: Callable[[Path], None]
    runs: tuple[str, ...]


WALKS = (
    Walk("A voice detector with a state", ("silero_vad",), clips, ("out/silero_vad",)),
    Walk(
        "A chain that reads text",
        ("rapidocr_onnxruntime", "PIL"),
        pages,
        (
            "detector/out/ch_PP-OCRv4_det_infer",
            "classifier/out/ch_ppocr_mobile_v2.0_cls_infer",
            "recognizer/out/ch_PP-OCRv4_rec_infer",
        ),
    ),
    Walk("A mixture of experts", ("transformers",), nothing, ("qwen3-moe-int4",)),
    Walk("The encoder of a speech model", ("transformers",), nothing, ("out/whisper",)),
    Walk("An encoder of sentences", ("transformers",), nothing, ("out/sentences",)),
)


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def files(section: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each Python file that a section shows."""
    for text in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, f"a block without a file name: {text[:40]!r}"
        yield name[1], text


def lines(section: str) -> list[list[str]]:
    """Return the words of each command that a section shows."""
    prose = re.sub(r"^```.*?^```$", "", section, flags=re.M | re.S)
    return [shlex.split(line) for line in re.findall(r"^ {4}(\S.*)$", prose, re.M)]


def test_the_walks_of_the_page_are_those_that_are_run() -> None:
    shown = sections()
    assert list(shown) == [walk.title for walk in WALKS]
    for section in shown.values():
        names = [name for name, _ in files(section)]
        install, *commands = lines(section)
        assert install[:2] == ["pip", "install"]
        assert {words[0] for words in commands} == {"python", "compress"}
        assert {words[1] for words in commands if words[0] == "python"} <= set(names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.title)
def test_a_walk(walk: Walk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in walk.packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            pytest.skip(f"{package} is not here: {error}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    time_briefly(monkeypatch)
    monkeypatch.setattr(cold_rounds, "ROUNDS", 1)
    section = sections()[walk.title]
    walk.data(tmp_path)
    for name, text in files(section):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for program, *words in lines(section):
        if program == "python":
            runpy.run_path(str(tmp_path / words[0]), run_name="__main__")
        elif program == "compress":
            with pytest.raises(SystemExit) as left:
                application.main(words)
            assert left.value.code == ExitCode.DONE, words
    for run in walk.runs:
        report = json.loads((tmp_path / run / "report.json").read_text())
        assert report["verdict"] in ("passed", "unknown")
        checks = [check for artifact in report["artifacts"] for check in artifact["checks"]]
        assert checks
        assert all(check["ok"] for check in checks)
