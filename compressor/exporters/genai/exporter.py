"""Export to a folder from which onnxruntime-genai generates text."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from compressor.errors import ArtifactError, SpecError
from compressor.exporters.genai.description import SETTINGS, Decoder, describe
from compressor.exporters.genai.graph import OPSET, decoder_graph
from compressor.exporters.genai.running import GenaiRunner
from compressor.exporters.onnx.file import (
    MODEL,
    Layout,
    check_file,
    check_tensors,
    described,
    lay_out,
    write_layout,
)
from compressor.exporters.onnx.matmul_nbits import Compute
from compressor.exporters.safetensors.code_layouts import caches_of
from compressor.exporters.safetensors.proof import OUTPUTS, too_large
from compressor.files import disk_errors
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.checkpoint.dequantized import dequantized
from compressor.models.checkpoint.folder import CONFIG, companions
from compressor.models.onnx.checksums import onnx_checksums
from compressor.models.onnx.file import PRODUCER
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.cached_attention import round_cache_of
from compressor.models.transformers.classes import library
from compressor.models.transformers.networks import loaded
from compressor.types.carrier import Carrier, Runner
from compressor.types.exporter import Check, ExportContext, Exporter
from compressor.types.layers import sqnr_db

TARGET = "genai"
_STEPS = "generated token by token in onnxruntime-genai, which is not what is timed here"
_LEFT = frozenset({CONFIG, "generation_config.json"})
_SAMPLED = 8  # tensors that are computed again
_TOKENS, _FIRST = 12, 7  # of the text that proves it: all, and those that are run at once
_LEAST_DB: Mapping[Compute, float] = {"float32": 50.0, "int8": 15.0}
"""Between outputs and those of the dequantized weights; inputs rounded to 8 bits cost the rest."""


class GenaiExporter(Exporter):
    """Writes ``model.onnx`` with a cache of keys and values, ``genai_config.json`` and tokenizer.

    onnxruntime-genai generates text from the folder. Codes that passes have found are written as
    they are, in blocks of ``MatMulNBits``; weights that stay float keep their type, but norms and
    biases are float32, in which ONNX Runtime computes. The cache holds floats, or the 8 or 4 bits
    that `quantize-cache` has found scales for. It takes llama, mistral, qwen2, qwen3, gemma and
    phi3 from Hugging Face directories.
    """

    format: ClassVar[str] = "genai"
    version: ClassVar[int] = 3
    targets: ClassVar[frozenset[str]] = frozenset({TARGET})
    not_judged: ClassVar[str] = _STEPS
    one_name: ClassVar[bool] = True  # the onnx package takes a second name for an attack

    matmul_compute: Compute = Field(
        default="int8",
        description="arithmetic of products with codes: int8 rounds their inputs to 8 bits, 32 "
        "numbers at a time, and is several times faster token by token; float32 rounds nothing, "
        "and takes codes of 3 and 4 bits",
    )

    def check(self, carrier: Carrier) -> None:
        """Check that there is a graph for the model, and kernels for its codes.

        Raises:
            SpecError: there is not.
            ModelError: configuration and weights disagree.
        """
        folder, decoder, _ = self._layout(carrier)
        decoder.settings(folder, MODEL)

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of all files."""
        folder, decoder, layout = self._layout(carrier)
        texts = len(decoder.settings(folder, MODEL).encode())
        texts += sum(path.stat().st_size for path in _taken(folder))
        return layout.nbytes + texts

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the files and check the graph.

        Raises:
            ArtifactError: onnx's checker refuses it, or it is not what was to be written.
            ModelError: a weight holds NaN or infinity.
        """
        if context.ranks.rank:
            return ()
        folder, decoder, layout = self._layout(carrier)
        expected = described(layout.proto)
        with disk_errors(directory):
            files = list(write_layout(layout, directory))
            files.append(directory / SETTINGS)
            files[-1].write_text(decoder.settings(folder, MODEL), encoding="utf-8")
            for source in _taken(folder):
                files.append(directory / source.name)
                files[-1].write_bytes(source.read_bytes())
        check_file(files[0], OPSET, expected)
        for name, sums in onnx_checksums(files[0]).items():
            context.summed(name, sums)
        return tuple(files)

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare the file with the model that it was made of."""
        _, _, layout = self._layout(carrier)
        codes = [t.codes for t in carrier.tensors().values() if t.codes is not None]
        names = list(layout.tensors)
        if all(each.by_rows for each in codes):  # others are known, and cost little to compare
            names = names[:: max(1, len(names) // _SAMPLED)]
        return check_tensors(path, {name: layout.tensors[name] for name in names})

    def prove(self, carrier: Carrier, path: Path) -> tuple[Check, ...]:
        """Return whether the graph gives the outputs that are meant, with a cache and without."""
        large = too_large(carrier.tensors().values())
        if large is not None:
            return (large,)
        _, network = describe(carrier)
        weights = {
            name: dequantized(tensor).to(torch.float32)
            for name, tensor in carrier.tensors().items()
        }
        reference, _ = loaded(type(network), network.config, weights, torch.float32)
        for attention, scheme in caches_of(carrier).items():
            round_cache_of(reference.get_submodule(attention), scheme)
        last = network.config.vocab_size - 1
        tokens = np.linspace(1, last, _TOKENS).astype(np.int64)[None]
        with torch.inference_mode():
            wanted = reference.eval()(input_ids=torch.from_numpy(tokens)).logits
        runner = GenaiRunner(path.parent)
        first, cache = runner.step(tokens[:, :_FIRST], runner.empty(1))
        parts = [first]
        for place in range(_FIRST, tokens.shape[1]):
            logits, cache = runner.step(tokens[:, place : place + 1], cache)
            parts.append(logits)
        found = torch.from_numpy(np.concatenate(parts, 1))
        distance = sqnr_db(wanted, found)
        if distance is not None and distance < _LEAST_DB[self.matmul_compute]:
            raise ArtifactError(
                f"artifact {path.name!r}",
                f"its logits are {distance:.1f} dB from those of the dequantized weights; at least "
                f"{_LEAST_DB[self.matmul_compute]:.0f} dB are expected",
                "report it, with the config.json",
            )
        shown = "equal" if distance is None else f"{distance:.0f} dB"
        return (Check(OUTPUTS, f"{shown}, a text at once and token by token"),)

    def remarks(self, carrier: Carrier) -> tuple[str, ...]:
        """Return what is missing for text, if anything is."""
        folder = carrier.folder
        if folder is None or (folder / "tokenizer.json").is_file():
            return ()
        return ("without tokenizer.json, onnxruntime-genai generates only from token numbers",)

    def open(self, path: Path) -> Runner:
        """Open the graph in ONNX Runtime, without a cache of earlier tokens."""
        return GenaiRunner(path if path.is_dir() else path.parent)

    def _layout(self, carrier: Carrier) -> tuple[Path, Decoder, Layout]:
        if carrier.folder is None or not isinstance(carrier, CheckpointCarrier | TorchCarrier):
            raise SpecError(
                "export genai",
                "needs a Hugging Face directory with config.json",
                "name one as model.checkpoint, with factory: transformers.AutoModelForCausalLM, "
                "and use no pass that rewrites the graph",
            )
        library()
        decoder, _ = describe(carrier)
        parts = decoder_graph(decoder, carrier.tensors(), self.matmul_compute)
        parts.proto.producer_name = PRODUCER
        parts.proto.producer_version = version("compressor")
        return carrier.folder, decoder, lay_out(parts, external=True)


def _taken(folder: Path) -> tuple[Path, ...]:
    """Return the files that are copied: those of the tokenizer, templates and licence."""
    found = companions(folder).values()
    return tuple(path for path in found if path.parent == folder and path.name not in _LEFT)
