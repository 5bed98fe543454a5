"""`prepare: auto` of quantize-static against `none` and ONNX Runtime's own quantizer.

ResNet-20 as published, and the same function with channels scaled by 2^±4 between its layers;
the face detector; and an encoder. Every figure comes from the exported file in ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from compressor.calibration.collect import collect_statistics
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.models.onnx.ort_session import OrtRunner
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.prepare.balance import ScaledGroup, scaled_weights
from compressor.passes.prepare.groups import scale_map
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.report.run import run_spec
from compressor.run.evaluate import evaluate
from compressor.run.metrics.class_metrics import ACCURACY
from compressor.spec.load import load_spec
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.statistics import Request
from compressor.types.tensors import Array, Batch, TensorSpec
from tests.benchmarks import bench_detector, peers
from tests.benchmarks.bench_resnet20 import fused, planned, show
from tests.benchmarks.marks import benchmark, needs
from tests.compressor.passes.quantize.static_models import Given

pytestmark = benchmark("COMPRESSOR_DATA")
_WORST = 4.0  # binary logarithm of the greatest factor
_RESNET = """\
version: 1
name: resnet
model: {{onnx: {file}}}
data:
  calibration:
    npz: {data}/cifar10_train4000.npz
    inputs: {{image: image}}
    transform: samples.cifar.data:normalize
    samples: 512
    batch: 32
passes:
  - {{pass: quantize-static, prepare: {prepare}, weights: {{bits: {bits}}}}}
exports:
  - {{format: onnx, target: ort-cpu}}
limits: {{size-ratio: null, latency-ratio: null}}
output: {output}
"""


def test_resnet20(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan")
    reference = plan.model.carrier.runner()
    network = fused(plan)
    batches = [{"image": b["image"]} for b in plan.data["calibration"].batches()]
    rows = []
    for name, carrier in (("as published", network), ("channels x 2^±4", stressed(network))):
        file = tmp_path / f"{len(rows)}.onnx"
        ir.save(carrier.graph(), file)
        for label, path, seconds in quantized(file, batches, tmp_path / f"{len(rows)}"):
            found = evaluate(OrtRunner(path, label), reference, plan.data["evaluation"], ACCURACY)
            sqnr = "" if found.sqnr_db is None else f"{found.sqnr_db:.2f}"
            rows.append([name, label, sqnr, f"{found.metric['value']:.2f}", f"{seconds:.1f}"])
    show("ResNet-20, 2,000 images", ["network", "artifact", "SQNR dB", "top-1 %", "CPU s"], rows)


def quantized(
    file: Path, batches: list[dict[str, np.ndarray]], folder: Path
) -> Iterator[tuple[str, Path, float]]:
    """Yield each artifact's name, its file, and the CPU seconds that it took."""
    yield "float", file, 0.0
    for bits in (8, 4):
        for prepare in ("none", "auto"):
            output = folder.with_name(f"{folder.name}-{bits}-{prepare}")
            spec = output.with_suffix(".yaml")
            data = os.environ["COMPRESSOR_DATA"]
            text = _RESNET.format(file=file, data=data, prepare=prepare, bits=bits, output=output)
            spec.write_text(text, encoding="utf-8")
            start = time.process_time()
            path = run_spec(load_spec(spec, [])).output / "model.onnx"
            yield f"W{bits}A8, prepare: {prepare}", path, time.process_time() - start
    prepared, path = folder.with_suffix(".prepared"), folder.with_suffix(".peer")
    peers.prepare(file, prepared)
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        peers.quantize(prepared, path, batches, "MinMax", False)
    yield "W8A8, ONNX Runtime", path, time.process_time() - start


def stressed(carrier: Carrier) -> Carrier:
    """Return the same function with channels that differ by up to 2^8 from each other."""
    random = torch.Generator().manual_seed(0)
    groups = scale_map(carrier.graph(), carrier.tensors()).groups
    scaled = []
    for group in groups:
        exponents = (2 * torch.rand(group.count, generator=random) - 1) * _WORST
        scaled.append(ScaledGroup(group, torch.exp2(exponents), 0.0))
    return OnnxCarrier(carrier.with_weights(scaled_weights(carrier, scaled)).graph())


def test_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench_detector.planned(tmp_path)
    reference = plan.model.carrier.runner()
    images = list(plan.data["evaluation"].batches())
    wanted = [reference.run(image) for image in images]
    rows = []
    for observer in ("auto", "mse", "extreme-value"):
        for prepare in ("none", "auto"):
            output = tmp_path / f"{observer}-{prepare}"
            settings = [
                f"passes.1.activations.observer={observer}",
                f"passes.1.prepare={prepare}",
                f"output={output}",
            ]
            start = time.process_time()
            path = run_spec(load_spec(tmp_path / "spec.yaml", settings)).output / "model.onnx"
            seconds = time.process_time() - start
            results = [OrtRunner(path, prepare).run(image) for image in images]
            _, _, score = bench_detector.agreement(wanted, results)
            levels = [
                f"{bench_detector.sqnr(wanted, results, name):.2f}" for name in ("scores", "boxes")
            ]
            rows.append(
                [f"{observer}, prepare: {prepare}", *levels, f"{score:.4f}", f"{seconds:.1f}"]
            )
    show("Face detector, W8A8", ["artifact", "scores dB", "boxes dB", "F1", "CPU s"], rows)


class Encoder(torch.nn.Module):
    """The published encoder, by its token ids."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import BertModel

        self.inner = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_ids, attention_mask).last_hidden_state
        return hidden


@needs("COMPRESSOR_ENCODER")
def test_encoder() -> None:
    folder = os.environ["COMPRESSOR_ENCODER"]
    specs = [
        TensorSpec(name, ("batch", "sequence"), "int64") for name in ("input_ids", "attention_mask")
    ]
    context = PassContext(targets=frozenset({"ort-cpu"}))
    network = Fuse().apply(TorchCarrier(Encoder(folder), specs), context, {}).carrier
    sentences = tokenized(Path(folder))
    calibration = [padded(sentences[i : i + 8]) for i in range(0, 96, 8)]
    evaluation = [padded([sentence]) for sentence in sentences[96:]]

    def collect(carrier: Carrier, requests: Sequence[Request]) -> dict[str, Any]:
        return collect_statistics(carrier, calibration, requests)

    wanted, rows = embeddings(network, evaluation), []
    for prepare in ("none", "auto"):
        declared = QuantizeStatic.model_validate({"prepare": prepare})
        start = time.process_time()
        statistics = collect(network, declared.survey(network, context).requests)
        given = replace(context, samples=Given(calibration))
        after = declared.apply(network, given, statistics).carrier
        found = embeddings(after, evaluation)
        seconds = time.process_time() - start
        norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(found, axis=1)
        cosine = (wanted * found).sum(1) / norms
        rows.append([prepare, f"{cosine.mean():.4f}", f"{cosine.min():.4f}", f"{seconds:.1f}"])
    show("MiniLM, static int8", ["prepare", "cosine", "worst", "CPU s"], rows)


def tokenized(folder: Path) -> list[list[int]]:
    """Return the token ids of sentences, always the same."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    text = (Path(os.environ["COMPRESSOR_DATA"]) / "tinyshakespeare.txt").read_text()
    sentences = [s.strip() for s in text.replace("\n", " ").split(". ")]
    fitting = [s for s in sentences if 20 < len(s) < 400]
    chosen = np.random.default_rng(0).choice(len(fitting), 240, replace=False)
    return [tokenizer.encode(fitting[index]).ids for index in chosen]


def padded(sentences: list[list[int]]) -> Batch:
    """Return a batch of sentences of different length."""
    longest = max(map(len, sentences))
    ids = np.zeros((len(sentences), longest), np.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence)] = sentence
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}


def embeddings(carrier: Carrier, batches: list[Batch]) -> Array:
    """Return the mean of each sentence's hidden states."""
    runner = carrier.runner()
    return np.concatenate([next(iter(runner.run(b).values())).mean(1) for b in batches])
