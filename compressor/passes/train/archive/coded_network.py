"""A network whose weights are computed of codebooks and codes while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from compressor.graph.editing import Editor
from compressor.graph.operators import operator
from compressor.models.element_types import tensor_of
from compressor.models.executor.node import Operator, Operators
from compressor.models.torch.lowering import NamedModule
from compressor.models.torch.smaller_module import trainable_graph
from compressor.passes.quantize.maths.floating import shortened
from compressor.passes.train.archive.coding import Coding, first_coding
from compressor.passes.train.archive.live_norms import (
    LiveNorm,
    inner_biases,
    live_norms,
    with_plain_statistics,
)
from compressor.passes.train.job import PREFIX
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes
from compressor.types.tensors import below

_DOMAIN = "compressor.coding"
_BOOK, _CODES = ".book", ".codes"
_SHORT = "short."
_EXPONENT = 2  # bits that the sign and the exponent of a scale or shift take, once coded
_SCALED = frozenset({"LayerNormalization", "PRelu"})
_AFFINE = 1, 2  # inputs of a batch norm: its scales and shifts; those behind are its statistics


class _Decode(torch.autograd.Function):
    """Values by code; the gradient goes to the values and, as if not rounded, to the weights.

    Where only a share of a weight is its value, and the rest is itself, values are not trained.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, book: Tensor, codes: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.size, ctx.share = book.numel(), share
        values = book[codes.long()].to(weight.dtype)
        return values if share == 1 else torch.lerp(weight * (values != 0), values, share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (codes,) = ctx.saved_tensors
        places = codes.flatten().long()
        values = gradient.new_zeros(ctx.size, dtype=torch.float64)
        if ctx.share == 1:  # unlike a weighted bincount, it can add in one order on a GPU, too
            values.index_add_(0, places, gradient.flatten().double())
        return gradient, values.to(gradient.dtype), None, None


class Decoder:
    """The implementation of the operator ``Decode``.

    Attributes:
        share: of each weight that is the value of its code, 0 to 1; the rest is the weight itself,
            but for those whose code is zero (BinaryRelax: P. Yin et al., 2018, arXiv:1801.06313).
    """

    def __init__(self) -> None:
        self.share = 1.0

    def __call__(self, weight: Tensor, book: Tensor, codes: Tensor) -> Tensor:
        """Return weights in the shape of ``weight``: of a codebook ``[K]``, by uint8 codes."""
        decoded: Tensor = _Decode.apply(weight, book, codes, self.share)  # type: ignore[no-untyped-call]  # PyTorch's has no types
        return decoded

    @property
    def operators(self) -> Operators:
        """The operator, as the executor takes it."""
        return {(_DOMAIN, "Decode"): Operator(self)}


@dataclass(frozen=True)
class CodedNetwork:
    """A module that computes with coded weights and vectors.

    Attributes:
        module: takes inputs and returns outputs by name.
        layers: those whose weights are coded, by the name of the weight.
        vectors: names of the biases and other vectors that are coded.
        float_bits: significant bits of the values of codebooks.
        decoder: what makes weights of codes.
        norms: batch norms, whose vectors are floats while they are trained.
        short: their scales and shifts once it is trained, by the names of weights and biases.
    """

    module: NamedModule
    layers: Mapping[str, Layer]
    vectors: tuple[str, ...]
    float_bits: int
    decoder: Decoder
    norms: tuple[LiveNorm, ...] = ()
    short: dict[str, Tensor] = field(default_factory=dict)

    @property
    def coded(self) -> tuple[str, ...]:
        """The names of all tensors that are coded."""
        return (*self.layers, *self.vectors)

    @property
    def books(self) -> frozenset[str]:
        """The parameters that are codebooks, by the module's names."""
        return frozenset(PREFIX + name + _BOOK for name in self.coded)

    def state(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers."""
        state = {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}
        return {**state, **{_SHORT + name: tensor for name, tensor in self.short.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what :meth:`state` returned."""
        # Names with dots look to PyTorch as if they were of submodules that it does not have.
        self.module.load_state_dict(dict(tensors), strict=False)
        short = below(_SHORT, tensors)
        self.short.clear()
        self.short.update(short)

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of all tensors that are trained, but for codebooks."""
        return (*self.coded, *(name for n in self.norms for name in (n.weight, n.bias)))

    def shorten(self) -> None:
        """Take scales and shifts of the norms as they are now, in a few significant bits.

        Channels that hardly vary have large scales. So it is shares of a scale that count, and no
        codebook: its values would suit the largest ones alone.
        """
        held = {name: tensor.cpu() for name, tensor in self._held().items()}
        for norm in self.norms:
            scale = shortened(held[norm.weight] * norm.factor(held), self.float_bits)
            shift = held[norm.bias] - held[norm.mean] * scale
            self.short[norm.weight] = scale
            self.short[norm.bias] = shortened(shift, self.float_bits)

    def _held(self) -> dict[str, Tensor]:
        held = self.module.state_dict()
        return {name.removeprefix(PREFIX): tensor.detach() for name, tensor in held.items()}

    def books_held(self) -> dict[str, Tensor]:
        """Return the codebooks themselves, by the name of what they are of."""
        held = self.module.state_dict()
        return {name: held[PREFIX + name + _BOOK] for name in self.coded}

    def codings(self, sensitivities: Callable[[str], Tensor] | None = None) -> dict[str, Coding]:
        """Return the weights as they are coded now, by name; all count alike if none is given.

        They are on the CPU, where sums have one order, wherever the module is trained.
        """
        held = self._held()
        found = {}
        for name in self.coded:
            weight, book, codes = (held[name + part].cpu() for part in ("", _BOOK, _CODES))
            felt = torch.ones_like(weight) if sensitivities is None else sensitivities(name).cpu()
            found[name] = Coding(weight.float(), book, codes, felt.float())
        return found

    @torch.no_grad()
    def code(self, codings: Mapping[str, Coding]) -> None:
        """Take other values and codes."""
        held = self.module.state_dict()
        for name, coding in codings.items():
            held[PREFIX + name + _BOOK].copy_(coding.book)
            held[PREFIX + name + _CODES].copy_(coding.codes)

    @torch.no_grad()
    def settle(self) -> None:
        """Set weights to the values of their codes, where the cost of errors is known."""
        held = self.module.state_dict()
        for name, coding in self.codings().items():
            held[PREFIX + name].copy_(coding.book[coding.codes.long()])

    def nbytes(self) -> float:
        """Return the bytes that weights and vectors take once they are coded."""
        bits = (self.float_bits + _EXPONENT) * sum(v.numel() for v in self.short.values())
        return bits / 8 + sum(coding.nbytes for coding in self.codings().values())

    def written(self, carrier: Carrier) -> Carrier:
        """Return the fused model with these codes and vectors."""
        codes = {n: WeightCodes.known(self.layers[n], q) for n, q in self.quantized().items()}
        vectors = {**self.short, **self.short_vectors()}
        plain = carrier.with_graph(with_plain_statistics(carrier.graph(), self.norms))
        return plain.with_weights(vectors).with_codes(codes)

    def quantized(self) -> dict[str, QuantizedTensor]:
        """Return the codes of each weight, in values that are taken and in rising order."""
        return {
            name: _quantized(self.layers[name], coding, self.float_bits)
            for name, coding in self.codings().items()
            if name in self.layers
        }

    def short_vectors(self) -> dict[str, Tensor]:
        """Return the vectors, of the few values that their codes say."""
        return {
            name: shortened(coding.book, self.float_bits)[coding.codes.long()]
            for name, coding in self.codings().items()
            if name in self.vectors
        }


def coded_network(
    graph: ir.Model,
    layers: Mapping[str, Layer],
    source: NamedModule,
    bits: int,
    float_bits: int,
) -> CodedNetwork:
    """Return a network of a fused graph, its weights in codebooks of ``2 ** bits`` values.

    Batch norms that the graph has are trained by batches.

    Args:
        graph: fused; it is not changed.
        layers: those whose weights are coded, by the name of the weight.
        source: the module that the graph was lowered from.
        bits: width of a code, 1 to 8.
        float_bits: significant bits of vectors and codebooks.
    """
    graph = graph.clone()
    editor = Editor(graph)
    norms, held = live_norms(graph), graph.graph.initializers
    apart = {*inner_biases(graph), *(name for norm in norms for name in norm.names)}
    vectors = tuple(n for n, value in held.items() if _is_vector(value) and n not in apart)
    coded = (*layers, *vectors)
    for name in coded:
        value = held[name]
        coding = first_coding(tensor_of(value).float(), bits)
        book = editor.constant(name + _BOOK, coding.book.numpy())
        codes = editor.constant(name + _CODES, coding.codes.numpy())
        _decoded(editor, value, book, codes)
    affine = {name for norm in norms for name in (norm.weight, norm.bias)}
    trained = {*coded, *affine, *(name + _BOOK for name in coded)}
    decoder = Decoder()
    executed = trainable_graph(graph, source.module, trained, operators=decoder.operators)
    module = _trained(executed, source, trained)
    return CodedNetwork(module, layers, vectors, float_bits, decoder, norms)


def float_network(graph: ir.Model, trained: Collection[str], source: NamedModule) -> NamedModule:
    """Return the network of a fused graph with its weights as they are.

    Args:
        graph: fused; it is not changed.
        trained: names of the initializers that are parameters with gradients.
        source: the module that the graph was lowered from.
    """
    return _trained(trainable_graph(graph.clone(), source.module, trained), source, trained)


def _trained(executed: nn.Module, source: NamedModule, trained: Collection[str]) -> NamedModule:
    module = NamedModule(executed, source.inputs, source.outputs)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.removeprefix(PREFIX) in trained)
    return module


def _is_vector(value: ir.Value) -> bool:
    """Whether an initializer is a vector of more than one float that is added or multiplied."""
    tensor = value.const_value
    return (
        tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and len(tensor.shape) == 1
        and tensor.size > 1
        and bool(value.uses())
        and all(_takes_vectors(reader, index) for reader, index in value.uses())
    )


def _takes_vectors(node: ir.Node, index: int) -> bool:
    """Whether a node adds a vector, or multiplies with it, and is differentiable in it."""
    if node.op_type == "BatchNormalization":
        return index in _AFFINE
    row = operator(node)
    with_bias = row.is_product and not row.bias_is_separate
    return bool(row.arithmetic) or with_bias or node.op_type in _SCALED


def _decoded(editor: Editor, value: ir.Value, book: ir.Value, codes: ir.Value) -> None:
    """Make all readers of an initializer read its decoded values."""
    readers, first = tuple(value.uses()), editor.first_reader(value)
    if first is None:
        return
    name = editor.free_name(f"{value.name}.Decode")
    output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Decode", [value, book, codes], domain=_DOMAIN, outputs=[output], name=name)
    first.prepend(node)
    for reader, index in readers:
        reader.replace_input_with(index, output)


def codebook_scheme(bits: int) -> Scheme:
    """Return the scheme of codes that a whole weight shares the values of."""
    return Scheme(
        bits, signed=False, granularity="tensor", element="codebook", scale_type="float32"
    )


def _quantized(layer: Layer, coding: Coding, float_bits: int) -> QuantizedTensor:
    used = torch.nonzero(coding.counts > 0).flatten()
    book = shortened(coding.book[used], float_bits)
    values, places = torch.unique(book, sorted=True, return_inverse=True)
    bits = max(1, (values.numel() - 1).bit_length())
    table = torch.zeros(coding.book.numel(), dtype=torch.uint8)
    table[used] = places.to(torch.uint8)
    codes = layer.canonical(table[coding.codes.long()]).contiguous()
    padded = torch.zeros(1, 1 << bits)
    padded[0, : values.numel()] = values
    scheme = codebook_scheme(bits)
    one, none = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8)
    return QuantizedTensor(codes, one, none, scheme, codebook=padded)
