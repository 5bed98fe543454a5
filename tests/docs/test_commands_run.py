"""Every command that the guides show is run, in a folder made like the reader's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models

from compressor import catalog
from compressor.cli.application import application
from compressor.errors import ExitCode
from compressor.run.timing import cold_rounds
from compressor.types.exporter import USUAL
from tests.compressor.brief_timing import time_briefly
from tests.compressor.tiny_project import (
    CHECKPOINT,
    ONNX,
    forget_modules,
    onnx_project,
    sample_images,
    torch_project,
)
from tests.compressor.voice import Voice
from tests.docs.test_docs import ROOT, YAML_BLOCKS, commands

SLOW = pytest.mark.slow
WALKS = "docs/walks.md"
FACES = "face_detector_rfb320.onnx"


@dataclass(frozen=True)
class Running:
    """How documented commands are run.

    Attributes:
        pattern: of the command.
        folder: the function that makes the folder in which it is run.
        code: what it exits with.
        before: a command that has to be run before.
        slow: it takes minutes.
        data: the file of COMPRESSOR_DATA that it needs.
    """

    pattern: str
    folder: Callable[[Path], None]
    code: ExitCode = ExitCode.DONE
    before: str = ""
    slow: bool = False
    data: str = ""


def nothing(folder: Path) -> None:
    del folder


def samples(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "samples", folder / "samples", ignore=ignored)


def tiny(folder: Path) -> None:
    project = torch_project(folder)
    project.spec["passes"] = [{"pass": "fuse"}, {"pass": "quantize-static"}]
    assert project.path.is_file()


def typical(folder: Path) -> None:
    onnx_project(folder)
    (folder / ONNX).rename(folder / "model.onnx")
    np.savez(folder / "typical.npz", image=sample_images(0, 256))


def bare(folder: Path) -> None:
    tiny(folder)
    (folder / "spec.yaml").unlink()
    (folder / CHECKPOINT).rename(folder / "weights.pt")


def llama(folder: Path) -> None:
    from tests.compressor.exporters.hugging_face import tiny as tiny_language_model

    torch.manual_seed(0)
    tiny_language_model("Llama", torch.float32).save_pretrained(folder / "Llama-dir")
    # Single letters, without steps before: llama.cpp has such a tokenizer.
    words = Tokenizer(models.BPE({chr(97 + n): n for n in range(26)}, [], unk_token="a"))
    words.save(str(folder / "Llama-dir" / "tokenizer.json"))
    for name in ("train", "held-out"):
        letters = torch.randint(97, 123, (2000,)).tolist()
        (folder / f"{name}.txt").write_text(" ".join(map(chr, letters)), encoding="utf-8")


def encoder(folder: Path) -> None:
    from tests.compressor.models.transformers_folders import save

    save(folder / "MiniLM", "bert")
    (folder / "MiniLM" / "tokenizer.json").touch()


def faces(folder: Path) -> None:
    shutil.copy(Path(os.environ["COMPRESSOR_DATA"], FACES), folder)


def pictures(folder: Path) -> None:
    onnx_project(folder)
    (folder / ONNX).rename(folder / "detector.onnx")
    (folder / "images").mkdir()
    for name in "ab":
        Image.new("L", (8, 8)).save(folder / "images" / f"{name}.png")


def voice(folder: Path) -> None:
    Voice(folder)


def voice_spec(folder: Path) -> None:
    Voice(folder)
    page = ROOT / "docs" / "feeds.md"
    (spec,) = (block for block in YAML_BLOCKS if block.page == page and block.complete)
    (folder / "voice.yaml").write_text(spec.text, encoding="utf-8")


def archived(folder: Path) -> None:
    carrier = torch_project(folder).plan().model.carrier
    catalog.load("exporter", "archive")().write(carrier, folder, USUAL)


def phone(folder: Path) -> None:
    carrier = torch_project(folder).plan().model.carrier
    (folder / "out" / "edge").mkdir(parents=True)
    catalog.load("exporter", "litert")().write(carrier, folder / "out" / "edge", USUAL)


def accepted(folder: Path) -> None:
    project = onnx_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        time_briefly(patch)
        project.run("output=out/my-model")
    shutil.copytree(folder / "out" / "my-model", folder / "baseline")


def signing(folder: Path) -> None:
    pytest.importorskip("cryptography", reason="signatures need the extra compressor[sign]")
    from tests.compressor.lab.verify.keys import write_keys

    accepted(folder)
    private, public = write_keys(folder, 1)
    private.rename(folder / "key.pem")
    public.rename(folder / "public.pem")


DIGITS = "compress run samples/digits/spec.yaml"
ENGINE = "compress run samples/digits/tensorrt.yaml"
GATE = "compress gate baseline out/my-model"
VERIFY = "compress verify out/my-model"
UNPACK = "compress unpack model.archive -o model --force"
RUNNING = (
    Running(r"compress (--help|doctor|schema|passes|exporters)\b", nothing),
    Running(r".*observer=entrpy", samples, ExitCode.BAD_SPEC),
    Running(ENGINE, samples, slow=True),
    Running(rf"{DIGITS} --set .*observer=entropy", samples, slow=True),
    Running(r"compress (plan|run) samples/digits/", samples),
    Running(
        r"compress inspect out/digits-tensorrt/model.engine", samples, before=ENGINE, slow=True
    ),
    Running(r"compress inspect out/digits", samples, before=DIGITS),
    Running(r"compress explain out/digits", samples, before=DIGITS),
    Running(r"compress tune samples/digits/", samples, slow=True),
    Running(r"compress tune model.onnx --data typical.npz", typical, slow=True),
    Running(r"compress explain samples/digits/.*leave-one-out", samples, before=DIGITS, slow=True),
    Running(r"compress inspect samples/digits/spec.yaml --roofline", samples),
    Running(r"compress bench .* --ssh", samples, ExitCode.BAD_INPUT, before=DIGITS, slow=True),
    Running(r"compress bench out/digits", samples, before=DIGITS, slow=True),
    Running(r"compress plan samples/tiny-llama/", samples, slow=True),
    Running(r".*checkpoint=../../out/llama-3m", samples, slow=True, data="none: trained first"),
    Running(r"compress run samples/tiny-llama/", samples, slow=True),
    Running(r"compress run samples/cifar/", samples, slow=True, data="resnet20_cifar10.th"),
    Running(r"compress init weights.pt", bare),
    Running(r"compress init detector.onnx --data images/", pictures),
    Running(r"compress init MiniLM", encoder),
    Running(r"compress init voice.onnx -o voice.yaml", voice),
    Running(r"compress (plan|run) voice.yaml", voice_spec),
    Running(rf"compress (inspect|init) {FACES}", faces, data=FACES),
    Running(r"compress quantize .*--kv-cache", llama, slow=True),
    # One of those that calibrate and judge is not slow.
    Running(
        r"compress quantize .* -o (Llama-(w8a8|gguf|gptq|genai)|OUT) .*--text", llama, slow=True
    ),
    Running(r"compress quantize (Llama-dir|DIR)", llama),
    Running(r"compress inspect out/edge/model.tflite", phone),
    Running(r"compress (unpack|inspect|verify) model.archive", archived),
    Running(r"compress verify model$", archived, before=UNPACK),
    Running(r"compress verify .*--sign", signing),
    Running(r"compress verify .*--key", signing, before=f"{VERIFY} --sign key.pem"),
    Running(VERIFY, accepted),
    Running(rf"{GATE} .*--history history.jsonl", accepted),
    Running(r"compress compare .*--history", accepted, before=f"{GATE} --history history.jsonl"),
    Running(r"compress (compare|gate) (baseline|out/my-model) out/my-model", accepted),
    Running(r"compress (plan|run) spec.yaml", tiny),
)


def shown() -> list[tuple[str, str]]:
    """Return each command once that has more than a name, with its page."""
    found: dict[str, str] = {}
    for page, line in commands():
        if page == WALKS:  # test_walks.py runs these, in their order
            continue
        words = shlex.split(line, comments=True)
        if len(words) > 2 or words[1] in ("--help", "doctor", "schema"):
            found.setdefault(shlex.join(words), page)
    return [(page, line) for line, page in found.items()]


def running(line: str) -> Running:
    how = next((r for r in RUNNING if re.match(r.pattern, line)), None)
    assert how is not None, f"no entry of RUNNING says how to run {line!r}"
    return how


def cases() -> list[object]:
    made = []
    for page, line in shown():
        how = next((r for r in RUNNING if re.match(r.pattern, line)), None)
        marks = [SLOW] if how is not None and how.slow else []
        made.append(pytest.param(line, id=f"{page}: {line}", marks=marks))
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Running], Path]:
    made: dict[str, Path] = {}

    def find(how: Running) -> Path:
        name = how.folder.__name__
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            how.folder(made[name])
        return made[name]

    return find


@pytest.fixture(scope="module")
def latest() -> dict[Path, str]:
    """For each folder, the command that was run before those that are shown."""
    return {}


def typed(line: str) -> int:
    """Run a command as it is typed; return its exit code."""
    forget_modules()
    names = {"NAME": "fuse" if " passes" in line else "onnx", "DIR": "Llama-dir", "OUT": "out"}
    with pytest.raises(SystemExit) as left:
        application.main([names.get(word, word) for word in shlex.split(line)[1:]])
    return int(left.value.code or 0)


@pytest.mark.parametrize("line", cases())
def test_a_shown_command_runs(
    line: str,
    place: Callable[[Running], Path],
    latest: dict[Path, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = running(line)
    if how.data and not Path(os.environ.get("COMPRESSOR_DATA", ""), how.data).is_file():
        pytest.skip(f"COMPRESSOR_DATA has no {how.data}")
    folder = place(how)
    monkeypatch.chdir(folder)
    time_briefly(monkeypatch)
    monkeypatch.setattr(cold_rounds, "ROUNDS", 1)
    if how.before and latest.get(folder) != how.before:
        assert typed(how.before) == ExitCode.DONE
        latest[folder] = how.before
    if line.startswith("compress run"):  # another spec may have the same output folder
        latest.pop(folder, None)
    assert typed(line) == how.code


def test_commands_that_nobody_runs_are_found() -> None:
    with pytest.raises(AssertionError, match="no entry of RUNNING"):
        running("compress run elsewhere.yaml")
    assert len(shown()) > 15
