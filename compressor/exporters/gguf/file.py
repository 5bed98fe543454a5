"""A GGUF file: planned to the byte, and then written tensor by tensor in blocks of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch

from compressor.errors import ArtifactError, ModelError, SpecError, not_finite
from compressor.exporters.gguf.architectures import ROPE_FACTORS, architecture_of, check_names
from compressor.exporters.gguf.blocks import SIZES, BlockFormat, format_of, pack, row_bytes
from compressor.exporters.gguf.experts import experts_together
from compressor.exporters.gguf.shapes import Shape, shape_of
from compressor.exporters.gguf.vocabulary import Vocabulary, read_vocabulary
from compressor.files import scratch
from compressor.models.checkpoint.carrier import CheckpointCarrier
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.networks import completed
from compressor.types.carrier import Carrier
from compressor.types.layers import StoredTensor

Floats = Literal["keep", "f32", "f16", "bf16", "q8_0", "q5_0", "q4_0"]
FLOATS: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_DTYPES = {name: dtype for dtype, name in FLOATS.items()}
_ROUNDED: Mapping[str, BlockFormat] = {"q8_0": "Q8_0", "q5_0": "Q5_0", "q4_0": "Q4_0"}
_ALIGNED = 32  # bytes between which tensors begin
_CHUNK = 1 << 22  # elements that are computed at once
ENDINGS = (".weight", ".bias")
"""The ends of tensors' names, which a file keeps whatever comes before them."""
_BUFFERS = "rotary_emb.inv_freq"  # computed anew by llama.cpp


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the file.

    Attributes:
        name: in the file.
        sources: what it is made of, one after another: a tensor, or those of all experts.
        kind: ``F32``, ``F16``, ``BF16`` or the format of its blocks.
        order: rows of the source in the order of the file, if it is another.
        plus_one: 1 is added to it.
        stacked: it has an axis for its sources.
    """

    name: str
    sources: tuple[StoredTensor, ...]
    kind: str
    order: torch.Tensor | None = None
    plus_one: bool = False
    stacked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes, those that vary slowest first."""
        shape = self.sources[0].shape
        return (len(self.sources), *shape) if self.stacked else shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the file, without what fills up to the next tensor."""
        if self.kind in _DTYPES:
            return self.elements * _DTYPES[self.kind].itemsize
        columns = self.shape[-1]
        return self.elements // columns * row_bytes(_block(self.kind), columns)

    def pieces(self, source: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield the bytes of one of its sources, uint8, some rows at a time.

        Raises:
            ModelError: a scale is not a float16 number, or a value is too large for its type.
        """
        if self.order is None:
            yield from (piece.reshape(-1) for piece in self._rows(source))
            return
        rows = torch.cat([piece.reshape(piece.shape[0], -1) for piece in self._rows(source)])
        yield rows[self.order].reshape(-1)

    def _rows(self, tensor: StoredTensor) -> Iterator[torch.Tensor]:
        """Yield bytes ``[rows, bytes]`` in the order of the checkpoint."""
        codes, value = tensor.codes, tensor.read()
        if codes is None:
            for part in _parts(value.shape):
                yield self._floats(tensor, value[part] if value.ndim else value.reshape(1))
            return
        matrix = codes.layer.canonical(value)
        parts = _parts(matrix.shape) if codes.by_rows else [slice(None)]
        for part in parts:
            try:
                yield pack(codes.compute(matrix[part]), _block(self.kind))
            except ValueError as error:
                raise ModelError(
                    f"layer {codes.layer.name!r}",
                    f"cannot be stored as {self.kind} without a change: {error}",
                    "quantize it in the spec that has this export, which chooses such scales",
                ) from error

    def _floats(self, tensor: StoredTensor, values: torch.Tensor) -> torch.Tensor:
        if not bool(values.isfinite().all()):
            raise not_finite(f"tensor {tensor.name!r}")
        if self.kind not in _DTYPES:
            from gguf import GGMLQuantizationType
            from gguf.quants import quantize

            exact = values.to(torch.float32).numpy()
            return torch.from_numpy(quantize(exact, GGMLQuantizationType[self.kind]))
        if self.plus_one:
            values = values.to(torch.float32) + 1
        kept = values.to(_DTYPES[self.kind])
        if bool(kept.isinf().any()):
            raise ModelError(
                f"tensor {tensor.name!r}",
                f"holds values that are too large for {self.kind.lower()}",
                "set floats: keep",
            )
        return kept.contiguous().view(torch.uint8).reshape(values.shape[0], -1)


@dataclass(frozen=True)
class FilePlan:
    """A GGUF file that will be written.

    Attributes:
        tensors: in the order of the file.
        left_out: tensors of the model that are not in it: those that read pictures.
    """

    shape: Shape
    vocabulary: Vocabulary
    tensors: tuple[PlannedTensor, ...]
    left_out: tuple[StoredTensor, ...] = ()

    def head(self, name: str) -> bytes:
        """Return everything in front of the tensors, for a model of a name."""
        import numpy as np
        from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType

        with scratch() as folder:
            writer = GGUFWriter(folder / "head", self.shape.architecture.name)
            writer.add_type("model")
            writer.add_name(name)
            writer.add_quantization_version(GGML_QUANT_VERSION)
            writer.add_file_type(LlamaFileType[self._file_type])
            self.shape.add_to(writer)
            self.vocabulary.add_to(writer)
            for tensor in self.tensors:
                kind = GGMLQuantizationType[tensor.kind]
                none = np.dtype(np.float32)
                writer.add_tensor_info(tensor.name, tensor.shape, none, tensor.nbytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            head = (folder / "head").read_bytes()
        return head + bytes(-len(head) % _ALIGNED)

    def nbytes(self, name: str) -> int:
        """Return the bytes of the file."""
        return len(self.head(name)) + sum(_filled(t.nbytes) for t in self.tensors)

    @property
    def _file_type(self) -> str:
        """What most weights are stored as, by llama.cpp's name."""
        counts = Counter[str]()
        for tensor in self.tensors:
            counts[tensor.kind] += tensor.elements
        kind = counts.most_common(1)[0][0]
        other = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
        small = "_S" if kind in ("Q3_K", "Q4_K", "Q5_K") else ""
        return other.get(kind, f"MOSTLY_{kind}{small}")

    def write(self, path: Path, name: str, advance: Callable[[int], None]) -> None:
        """Write the file.

        Args:
            name: of the model.
            advance: called with the bytes of float weights that have been worked on.

        Raises:
            OSError: the disk is full.
            ModelError: as :meth:`PlannedTensor.pieces`.
        """
        done = 0
        with path.open("xb") as file:
            file.write(self.head(name))
            for tensor in self.tensors:
                written = 0
                for source in tensor.sources:
                    for piece in tensor.pieces(source):
                        file.write(piece.numpy().data)
                        written += piece.numel()
                    done += source.float_nbytes
                    advance(done)
                if written != tensor.nbytes:
                    raise ArtifactError(
                        f"tensor {tensor.name!r}",
                        f"takes {written} bytes, {tensor.nbytes} were planned",
                        "report it, with the config.json",
                    )
                file.write(bytes(_filled(written) - written))


def plan_file(carrier: Carrier, floats: Floats, cut: str | None) -> FilePlan:
    """Plan the file of a model; nothing is computed.

    Args:
        floats: what matrices are stored as that no pass has quantized.
        cut: llama.cpp's name of how text is cut, if it is not to be found out.

    Raises:
        SpecError: there is no such architecture or tokenizer in llama.cpp, or a layer's codes lie
            on the grid of none of its formats.
        ModelError: configuration, tokenizer and weights disagree.
    """
    if carrier.folder is None or not isinstance(carrier, CheckpointCarrier | TorchCarrier):
        raise SpecError(
            "export gguf",
            "needs a Hugging Face directory, whose config.json and tokenizer it takes along",
            "name one as model.checkpoint, with factory: transformers.AutoModelForCausalLM, and "
            "use no pass that rewrites the graph",
        )
    config = dict(carrier.config)
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = architecture_of(config)
    if architecture.sparse_config:
        config = completed(config)
    names = {value: key for key, value in MODEL_ARCH_NAMES.items()}
    blocks = config.get("num_hidden_layers")
    mapping = get_tensor_name_map(names[architecture.name], blocks if type(blocks) is int else 0)
    held = {n: t for n, t in carrier.tensors().items() if not n.endswith(_BUFFERS)}
    sources = {text: tensor for n, tensor in held.items() if (text := architecture.in_text(n))}
    left_out = tuple(tensor for n, tensor in held.items() if not architecture.in_text(n))
    places = {n: str(mapping.get_name(n, ENDINGS)) for n in sources}
    table = next((sources[n] for n, new in places.items() if new == "token_embd.weight"), None)
    shape = shape_of(config, 0 if table is None else table.shape[0])
    parts = experts_together(sources, 0 if shape.experts is None else shape.experts.count)
    placed = {n: str(mapping.get_name(n, ENDINGS)) for n in parts}
    check_names(architecture, shape.blocks, placed)
    vocabulary = read_vocabulary(carrier.folder, shape.vocabulary, cut)
    planned = [_planned(parts[old], new, shape, floats) for old, new in placed.items()]
    if shape.factors is not None:
        factors = shape.factors
        stored = StoredTensor(ROPE_FACTORS, tuple(factors.shape), factors.dtype, factors.detach)
        planned.insert(0, PlannedTensor(ROPE_FACTORS, (stored,), "F32"))
    return FilePlan(shape, vocabulary, tuple(planned), left_out)


def _planned(
    sources: tuple[StoredTensor, ...], name: str, shape: Shape, floats: Floats
) -> PlannedTensor:
    architecture = shape.architecture
    kinds = [_kind(source, floats, plain=architecture.in_single(name)) for source in sources]
    first = sources[0]
    for source, kind in zip(sources, kinds, strict=True):
        if kind != kinds[0] or source.shape != first.shape:
            raise SpecError(
                f"layer {source.name!r}",
                f"is {kind} {list(source.shape)}, and {first.name!r} {kinds[0]} "
                f"{list(first.shape)}: a GGUF file has all experts of a block in one tensor",
                "let one rule decide for all experts",
            )
    order, plus_one = shape.order(name), architecture.adds_one(name)
    return PlannedTensor(name, sources, kinds[0], order, plus_one, architecture.stacks(name))


def _kind(source: StoredTensor, floats: Floats, *, plain: bool) -> str:
    """Return what a tensor is stored as.

    Args:
        plain: it is float32 in any case.
    """
    if source.codes is not None:
        kind = format_of(source.codes.scheme, source.shape[-1])
        layer = source.codes.layer
        if kind is None or layer.transposed or len(source.shape) != 2:
            raise SpecError(
                f"layer {layer.name!r}",
                f"is {source.codes.scheme} of {source.shape[-1]} columns, for which GGUF has no "
                "blocks",
                "use 4, 5 or 8 bits in groups of 32, 64, ... without zero points, or mxfp4, or "
                "skip the layer by a rule",
            )
        return kind
    if source.dtype not in FLOATS:
        raise SpecError(
            f"tensor {source.name!r}",
            f"is {str(source.dtype).removeprefix('torch.')}, which is not written to GGUF",
            "cast it to float32",
        )
    if plain or len(source.shape) < 2:  # llama.cpp computes with norms and biases of float32 only
        return "F32"
    rounded = _ROUNDED.get(floats)
    if rounded is not None and source.shape[-1] % SIZES[rounded][0] == 0:
        return rounded
    kept = floats if floats not in ("keep", *_ROUNDED) else ""
    return kept.upper() or FLOATS[source.dtype]


def _block(kind: str) -> BlockFormat:
    return next(name for name in SIZES if name == kind)


def _filled(nbytes: int) -> int:
    """Return the bytes up to the next tensor."""
    return nbytes + -nbytes % _ALIGNED


def _parts(shape: tuple[int, ...] | torch.Size) -> list[slice]:
    """Cut the first axis so that a part has about so many elements, and one row at least."""
    if not shape:
        return [slice(None)]
    step = max(1, _CHUNK // max(1, prod(shape[1:])))
    return [slice(start, start + step) for start in range(0, shape[0], step)]
