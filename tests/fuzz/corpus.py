"""The files that are changed: small, made here, and the same each time."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import torch
from PIL import Image
from safetensors.torch import save_file

from compressor.lab.compare.compare import CompareOptions, compare_runs
from compressor.lab.compare.history import append, entry_of
from compressor.run.timing import timing
from tests.compressor.brief_timing import BRIEF
from tests.compressor.lab.inspect.test_inspect_engine import document, written
from tests.compressor.models import wild_models
from tests.compressor.test_switch import OLD, pending, write
from tests.compressor.tiny_project import Project, onnx_project, tiny_module, tiny_onnx

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "samples" / "tiny-llama" / "checkpoint" / "tokenizer.json"
WILD = ("branches", "loop", "scan", "functions", "contrib", "several")


def make_corpus(folder: Path) -> None:
    """Write all seeds; takes seconds, as most of them are what a run leaves."""
    torch.manual_seed(0)
    _run(folder / "run")
    _two_runs(folder / "run" / "out" / "tiny", folder / "runs")
    _history(folder / "runs")
    _onnx(folder / "onnx")
    _checkpoints(folder)
    _data(folder / "data")
    _gguf(folder / "gguf")
    _devices(folder / "devices")
    project = onnx_project(folder / "spec")
    _passes(project)
    _ = project.path
    (folder / "engine").mkdir()
    written(folder / "engine", document(b"engine"))
    write(folder / "switch", OLD)
    pending(folder / "switch")


def _two_runs(run: Path, folder: Path) -> None:
    """Copy a run twice, without its pages for people."""
    for name in ("base", "next"):
        shutil.copytree(run, folder / name, ignore=shutil.ignore_patterns("report.html"))


def _passes(project: Project) -> None:
    project.spec["passes"] = [
        {"pass": "prune-magnitude", "sparsity": 0.5},
        {"pass": "quantize-weights", "bits": 4, "layers": [{"match": "fc*", "bits": 8}]},
    ]
    project.spec["exports"] = [{"format": f} for f in ("safetensors", "onnx", "archive")]
    project.spec["metric"] = "accuracy"


def _run(folder: Path) -> None:
    """Leave what a run leaves."""
    project = onnx_project(folder)
    _passes(project)
    with patch.multiple(timing, **BRIEF):
        project.run()
    shutil.rmtree(project.store)


def _history(folder: Path) -> None:
    options = CompareOptions(artifact="onnx", timing=False)
    entries: list[Any] = []
    for name in ("base", "next"):
        side = compare_runs(folder / name, folder / name, options).candidate
        entries = append(folder / "history.jsonl", entries, entry_of(side, name))


def _onnx(folder: Path) -> None:
    folder.mkdir()
    for name in WILD:
        wild = getattr(wild_models, name)()
        onnx.save(wild.model, folder / f"{name}.onnx")
    (folder / "outside").mkdir()
    onnx.save(
        tiny_onnx(),
        folder / "outside" / "external.onnx",
        save_as_external_data=True,
        location="external.data",
        size_threshold=0,
    )


def _checkpoints(folder: Path) -> None:
    tensors = {name: t.clone().contiguous() for name, t in tiny_module().state_dict().items()}
    names = list(tensors)
    (folder / "hf").mkdir()
    (folder / "pickle").mkdir()
    places = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / "hf" / shard, {"format": "pt"})
        places |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["re:fc.*", "Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        },
    }
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pickle" / "tiny.pt")


def _gguf(folder: Path) -> None:
    """Leave a small random Llama with its vocabulary."""
    from compressor.exporters.gguf.exporter import GgufExporter
    from compressor.models.checkpoint.carrier import open_checkpoint
    from compressor.types.exporter import USUAL
    from tests.compressor.exporters.gguf.folders import save

    save(folder / "llama")
    GgufExporter().write(open_checkpoint(folder / "llama"), folder, USUAL)
    shutil.rmtree(folder / "llama")


def _devices(folder: Path) -> None:
    """Leave a small network in the formats of runtimes that do not read ONNX."""
    from compressor import catalog
    from compressor.models.onnx.carrier import open_onnx
    from compressor.models.torch.lowering import OPSET
    from compressor.types.exporter import USUAL

    folder.mkdir()
    onnx.save(tiny_onnx(), folder / "tiny.onnx")
    for name in ("litert", "openvino", "ort"):
        carrier = open_onnx(folder / "tiny.onnx", OPSET)
        catalog.load("exporter", name)().write(carrier, folder, USUAL)


def _data(folder: Path) -> None:
    (folder / "images" / "cat").mkdir(parents=True)
    rng = np.random.default_rng(3)
    arrays = {
        "image": rng.standard_normal((12, 1, 4, 4)).astype(np.float32),
        "label": rng.integers(0, 4, 12),
    }
    np.savez(folder / "data.npz", **arrays)
    np.save(folder / "data.npy", np.asfortranarray(arrays["image"]))
    save_file({n: torch.from_numpy(a) for n, a in arrays.items()}, folder / "data.safetensors")
    picture = Image.fromarray(rng.integers(0, 255, (9, 7, 3), np.uint8))
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        picture.save(folder / "images" / "cat" / f"one.{suffix}")
    (folder / "sounds").mkdir()
    for name, width in (("one", 2), ("two", 1), ("three", 3)):
        with wave.open(str(folder / "sounds" / f"{name}.wav"), "wb") as sound:
            sound.setparams((width, width, 8000, 0, "NONE", ""))
            sound.writeframes(rng.integers(0, 255, 400 * width * width, np.uint8).tobytes())
    prepared = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 6, "width": 6},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(prepared))
    lines = [json.dumps({"text": f"a line of text, number {n}, é"}) for n in range(8)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "data.txt").write_text("\n".join(lines) + "\n")
    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
