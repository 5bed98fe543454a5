"""What reads files from outside: each with its seeds, how they are changed, and its calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from compressor.files import file_sha256, settle
from compressor.types.proofs import sealed_text
from tests.fuzz import mutations
from tests.fuzz.mutations import Mutation

Call = tuple[str, ...] | Callable[[Path], object]
"""Words of a command line, in which ``{}`` is the folder; or a function of the folder."""


@dataclass(frozen=True)
class Reader:
    """One kind of input.

    Attributes:
        folder: the seed's folder in the corpus; it is copied for each input.
        files: those that are changed, one for each input.
        calls: what reads it. A call that needs no file but this one may end in any way that a
            user can understand.
        after: makes checksums in other files fit what was changed.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    mutate: Mutation
    calls: tuple[Call, ...]
    after: Callable[[Path], None] = lambda _: None

    def call(self, number: int, file: str) -> Call:
        """Return the call for an input: they take turns."""
        call = self.calls[number % len(self.calls)]
        if callable(call):
            return call
        return tuple(word.replace("{file}", file) for word in call)


def _inspect(*path: str) -> tuple[str, ...]:
    return ("inspect", "/".join(("{}", *path)))


def _json(*words: str) -> tuple[str, ...]:
    return (*words, "--json")


def _manifest(folder: Path) -> None:
    """Let the manifest of a run state the hashes of its files as they are."""
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())
    for entry in content["outputs"]:
        if (folder / entry["name"]).is_file():
            entry["sha256"] = file_sha256(folder / entry["name"])
    path.write_text(sealed_text(content))


def _reseal(name: str) -> Callable[[Path], None]:
    return lambda folder: _manifest(folder / name)


def _weights(folder: Path) -> None:
    """Let the weights state the hash of ``model.json`` as it is."""
    from compressor.models.codec.reading import DIGEST

    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"][DIGEST] = sha256((folder / "model.json").read_bytes()).hexdigest()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _load(name: str) -> Callable[[Path], object]:
    def load(folder: Path) -> None:
        import compressor

        module = compressor.load(folder / name)
        for tensor in module.state_dict().values():
            tensor.clone()
        with suppress(TypeError):  # other inputs than this one
            module(torch.zeros(1, 1, 8, 8))

    return load


def _gguf(folder: Path) -> None:
    from compressor.exporters.gguf.reading import GgufRunner

    GgufRunner(folder / "model.gguf")


def _bench(folder: Path) -> None:
    from compressor.lab.bench.finding import find_artifacts

    find_artifacts([folder / "base"])


def _beside(folder: Path) -> None:
    from compressor.report.past_runs import points, related_runs

    own = json.loads((folder / "next" / "report.json").read_bytes())
    related = related_runs(folder / "next", own)
    json.dumps([str(point) for point in points(own, related)])


_FILES = ("tokenizer", "preprocessor")  # options that name one


def _data(kind: str, name: str, **options: Any) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        from compressor import catalog

        paths = {k: folder / v for k, v in options.items() if k in _FILES}
        others = {k: v for k, v in options.items() if k not in _FILES}
        source = catalog.load("source", kind)(path=folder / name, **paths, **others)
        source.info()
        for _ in source.batches(5, 10):
            pass
        source.digest()

    return read


def _settle(folder: Path) -> None:
    settle(folder)


_TWO = ("{}/base", "{}/next", "--no-timing", "--artifact=onnx")
_OUT = "out/tiny"
_PICTURES = tuple(f"images/cat/one.{s}" for s in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"))
_ONNX = tuple(f"{name}.onnx" for name in ("branches", "loop", "scan", "functions", "several"))
_TOKENS = {"tokenizer": "tokenizer.json", "length": 8}
_LINES = {**_TOKENS, "samples_per": "line"}
_PLAN = ("plan", "{}/spec.yaml")

READERS = (
    Reader(
        "safetensors",
        "hf",
        ("model-00001-of-00002.safetensors",),
        mutations.safetensors,
        (_inspect("{file}"), _json(*_inspect("{file}")), ("init", "{}/{file}", "-o", "{}/s.yaml")),
    ),
    Reader(
        "Hugging Face index",
        "hf",
        ("model.safetensors.index.json",),
        mutations.json_text,
        (_inspect(), ("init", "{}", "-o", "{}/s.yaml")),
    ),
    Reader(
        "Hugging Face config",
        "hf",
        ("config.json",),
        mutations.json_text,
        (_inspect(), ("init", "{}", "-o", "{}/s.yaml")),
    ),
    Reader("PyTorch checkpoint", "pickle", ("tiny.pt",), mutations.zipped, (_inspect("tiny.pt"),)),
    Reader(
        "ONNX",
        "onnx",
        _ONNX,
        mutations.onnx_file,
        (_inspect("{file}"), _json(*_inspect("{file}")), ("init", "{}/{file}", "-o", "{}/s.yaml")),
    ),
    Reader(
        "ONNX with external data",
        "onnx/outside",
        ("external.onnx", "external.data"),
        lambda rng, data: (mutations.onnx_file if b"Conv" in data else mutations.flipped)(
            rng, data
        ),
        (_inspect("external.onnx"), _load("external.onnx")),
    ),
    Reader("npz", "data", ("data.npz",), mutations.zipped, (_data("npz", "data.npz"),)),
    Reader("npy", "data", ("data.npy",), mutations.npy, (_data("npy", "data.npy"),)),
    Reader(
        "safetensors data",
        "data",
        ("data.safetensors",),
        mutations.safetensors,
        (_data("safetensors", "data.safetensors"),),
    ),
    Reader(
        "JSON Lines",
        "data",
        ("data.jsonl",),
        mutations.json_lines,
        (_data("jsonl", "data.jsonl", **_TOKENS), _data("jsonl", "data.jsonl", **_LINES)),
    ),
    Reader(
        "text",
        "data",
        ("data.txt",),
        mutations.flipped,
        (_data("text", "data.txt", **_TOKENS), _data("text", "data.txt", **_LINES)),
    ),
    Reader(
        "tokenizer",
        "data",
        ("tokenizer.json",),
        mutations.json_text,
        (_data("text", "data.txt", **_TOKENS), _data("text", "data.txt", **_LINES)),
    ),
    Reader("images", "data", _PICTURES, mutations.png, (_data("images", "images", size=(6, 6)),)),
    Reader(
        "images' preprocessor",
        "data",
        ("preprocessor_config.json",),
        mutations.json_text,
        (_data("images", "images", preprocessor="preprocessor_config.json"),),
    ),
    Reader(
        "sounds",
        "data",
        tuple(f"sounds/{name}.wav" for name in ("one", "two", "three")),
        mutations.flipped,
        (
            _data("wav", "sounds", length=100),
            _data("wav", "sounds", length=100, rate=6000, mono=True),
        ),
    ),
    Reader("YAML spec", "spec", ("spec.yaml",), mutations.yaml_text, (_PLAN, _json(*_PLAN))),
    Reader(
        "report",
        "runs",
        ("base/report.json",),
        mutations.json_text,
        (
            _inspect("base"),
            ("compare", *_TWO),
            ("gate", *_TWO),
            _bench,
            _beside,
            ("explain", "{}/base"),
            _json("explain", "{}/base"),
        ),
        _reseal("base"),
    ),
    Reader(
        "manifest",
        "runs",
        ("base/manifest.json",),
        mutations.json_text,
        (_inspect("base"), _json("compare", *_TWO), _bench, ("explain", "{}/base", "--apply")),
    ),
    Reader(
        "single samples",
        "runs",
        ("base/samples.npz",),
        mutations.zipped,
        (("compare", *_TWO), ("gate", *_TWO)),
        _reseal("base"),
    ),
    Reader(
        "history",
        "runs",
        ("history.jsonl",),
        mutations.json_lines,
        (("compare", *_TWO, "--history", "{}/history.jsonl"),),
    ),
    Reader(
        "engine manifest",
        "engine",
        ("model.engine.json",),
        mutations.json_text,
        (_inspect("model.engine"), _json(*_inspect("model.engine"))),
    ),
    Reader("unfinished switch", "switch", (".switch/gone.json",), mutations.json_text, (_settle,)),
    Reader(
        "model.json",
        f"run/{_OUT}",
        ("model.json",),
        mutations.json_text,
        (_load(""), _inspect("model.json")),
        _weights,
    ),
    Reader(
        "model.safetensors",
        f"run/{_OUT}",
        ("model.safetensors",),
        mutations.safetensors,
        (_load(""), _inspect("model.safetensors")),
    ),
    Reader(
        "archive",
        f"run/{_OUT}",
        ("model.archive",),
        mutations.archive,
        (
            _inspect("model.archive"),
            ("unpack", "{}/model.archive", "-o", "{}/unpacked"),
            ("unpack", "{}/model.archive", "-o", "{}/unpacked", "--tensor", "fc.weight"),
        ),
    ),
    Reader(
        "GGUF",
        "gguf",
        ("model.gguf",),
        mutations.gguf,
        (_inspect("model.gguf"), _gguf, _json(*_inspect("model.gguf"))),
    ),
    Reader(
        "files for devices",
        "devices",
        ("model.tflite", "model.ort", "model.xml", "model.bin"),
        mutations.flipped,
        (_inspect("{file}"), _json(*_inspect("{file}"))),
    ),
    Reader(
        "exported ONNX",
        f"run/{_OUT}",
        ("model.onnx",),
        mutations.onnx_file,
        (_inspect("model.onnx"), _load("model.onnx")),
    ),
)
