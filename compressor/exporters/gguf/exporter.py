"""Export to GGUF: one file for llama.cpp and the programs around it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from compressor.errors import ArtifactError, SpecError
from compressor.exporters.gguf.file import FilePlan, Floats, PlannedTensor, plan_file
from compressor.exporters.gguf.reading import GgufFile, GgufRunner, network_of
from compressor.exporters.safetensors.proof import OUTPUTS, compare, too_large
from compressor.files import disk_errors
from compressor.models.checkpoint.dequantized import dequantized
from compressor.models.transformers.reading import float_class_of
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.exporter import USUAL, Check, ExportContext, Exporter

NAME = "model.gguf"
TARGET = "gguf"
_SAMPLED = 8  # tensors whose codes are computed again
_LLAMA = "served by llama.cpp, which is not what runs here"


class GgufExporter(Exporter):
    """Writes ``model.gguf``: weights, configuration, tokenizer and chat template in one file.

    llama.cpp and the programs around it open it. Codes that passes have found are written as they
    are, in the block format on whose grid they lie: Q4_0, Q5_0 and Q8_0 for symmetric codes of up
    to 4, of 5 and of 8 bits, Q4_1 with zero points, Q2_K to Q6_K where scales are shared by 256
    columns or whole rows, and MXFP4. A pass in the same spec rounds scales to numbers that these
    formats hold. The float weights of all other layers keep their type. It takes llama, mistral,
    qwen2, qwen3, gemma, gemma2 and gemma3 from Hugging Face directories, and of mixtures of experts
    mixtral, qwen2_moe and qwen3_moe.
    """

    format: ClassVar[str] = "gguf"
    targets: ClassVar[frozenset[str]] = frozenset({TARGET})
    packs: ClassVar[bool] = True
    not_judged: ClassVar[str] = _LLAMA

    floats: Floats = Field(
        default="keep",
        description="storage of embeddings and other matrices that no pass has quantized: keep "
        "their type, another float type, or blocks that they are rounded to here, which the "
        "artifact's metric includes",
    )
    pre_tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="llama.cpp's name for the pre-tokenizer, for tokenizers that are not known "
        "here",
    )

    @property
    def tools(self) -> Mapping[str, str]:
        """The package that writes the head of the file."""
        return {"gguf": version("gguf")}

    def check(self, carrier: Carrier) -> None:
        """Check that llama.cpp has code for the model and its tokenizer, and blocks for its codes.

        Raises:
            SpecError: it has not, or the package gguf is not installed.
            ModelError: configuration, tokenizer and weights disagree.
        """
        self._plan(carrier)

    def predict(self, carrier: Carrier) -> int:
        """Return the bytes of the file; the name of the model counts with its usual length."""
        return self._plan(carrier).nbytes(USUAL.name)

    def write(self, carrier: Carrier, directory: Path, context: ExportContext) -> tuple[Path, ...]:
        """Write the file and open it.

        Raises:
            ArtifactError: it cannot be opened again.
            ModelError: a weight holds NaN or infinity, or a scale is not a float16 number.
        """
        if context.ranks.rank:
            return ()
        path = directory / NAME
        with disk_errors(path):
            self._plan(carrier).write(path, context.name, context.advance)
        GgufFile(path)
        return (path,)

    def check_written(self, carrier: Carrier, path: Path) -> str:
        """Compare the file with the model that it was made of.

        All tensors are compared by name, type and shape. Those whose codes are known, and some of
        the others, are decoded by the library and compared with what is meant, bit for bit.

        Raises:
            ArtifactError: they differ.
        """
        plan, file = self._plan(carrier), GgufFile(path)
        for tensor in plan.tensors:
            name = tensor.name
            held = (file.kind(name), file.shape(name)) if name in file.names else None
            if held != (tensor.kind, tensor.shape):
                raise _differs(name, "is missing, or of another type or shape")
        chosen = _sample(plan)
        for tensor in chosen:
            _compare(tensor, file)
        return f"{len(plan.tensors)} tensors, {len(chosen)} of them decoded: equal bit for bit"

    def prove(self, carrier: Carrier, path: Path) -> tuple[Check, ...]:
        """Return whether the network that the file describes gives the outputs that are meant."""
        large = too_large(carrier.tensors().values())
        if large is not None:
            return (large,)
        network, why = float_class_of(carrier)
        if network is None:
            return (Check(OUTPUTS, f"not compared: {why}", known=False),)
        file = GgufFile(path)
        weights = {name: dequantized(tensor) for name, tensor in carrier.tensors().items()}
        return (compare(network_of(file), weights, network, file.subject, {}),)

    def remarks(self, carrier: Carrier) -> tuple[str, ...]:
        """Return what of the model is not in the file."""
        left_out = self._plan(carrier).left_out
        if not left_out:
            return ()
        size = sum(tensor.nbytes for tensor in left_out)
        return (
            f"{NAME} holds the text part of the model; {len(left_out)} tensors of "
            f"{size / 1e6:.1f} MB that read pictures are left out, which llama.cpp loads from a "
            "separate file (--mmproj)",
        )

    def open(self, path: Path) -> Runner:
        """Open the network that the file describes; the library decodes its tensors."""
        self.need_package("gguf", opened=path)
        self.need_package("transformers", opened=path)
        return GgufRunner(path)

    def _plan(self, carrier: Carrier) -> FilePlan:
        self.need_package("gguf")
        self.need_package("transformers")
        rounds = self.floats not in ("keep", "f32")
        if rounds and Capability.RUN not in carrier.offers:
            raise SpecError(
                "export gguf: floats",
                f"is {self.floats!r}, which changes weights, but a bare checkpoint is judged only "
                "by its codes",
                "set floats: keep, or set model.factory, such as transformers.AutoModelForCausalLM",
            )
        return plan_file(carrier, self.floats, self.pre_tokenizer)


def _sample(plan: FilePlan) -> list[PlannedTensor]:
    """Return the tensors that are compared: those with known codes, and some of the others."""
    floats = [tensor for tensor in plan.tensors if tensor.sources[0].codes is None]
    codes = [(t, t.sources[0].codes) for t in plan.tensors]
    known = [t for t, found in codes if found is not None and not found.by_rows]
    others = [t for t, found in codes if found is not None and found.by_rows]
    return [
        *known,
        *others[:: max(1, len(others) // _SAMPLED)],
        *floats[:: max(1, len(floats) // _SAMPLED)],
    ]


def _compare(tensor: PlannedTensor, file: GgufFile) -> None:
    """Compare a tensor of the file, as the library decodes it, with what it is made of."""
    for number, source in enumerate(tensor.sources):
        index = number if tensor.stacked else None
        if source.codes is None:
            expected = torch.cat(list(tensor.pieces(source)))
            same = torch.equal(file.raw(tensor.name, index), expected)
        else:
            values = dequantized(source)
            values = values if tensor.order is None else values[tensor.order]
            same = torch.equal(file.read(tensor.name, index), values)
        if not same:
            raise _differs(tensor.name, "holds other values than the model")


def _differs(name: str, problem: str) -> ArtifactError:
    remedy = "the disk or the memory is faulty; export it again"
    return ArtifactError(f"tensor {name!r}", f"in {NAME} {problem}", remedy)
