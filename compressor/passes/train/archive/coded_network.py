"""A network whose weights are computed of codebooks and codes while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.graph.editing import Editor
from compressor.graph.operators import operator
from compressor.models.element_types import from_numpy
from compressor.models.executor.node import Operator, Operators
from compressor.models.torch.lowering import NamedModule
from compressor.models.torch.smaller_module import trainable_graph
from compressor.passes.quantize.maths.floating import shortened
from compressor.passes.train.archive.coding import Coding, assigned, first_coding
from compressor.passes.train.job import PREFIX, Micro, Regulator
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes

_DOMAIN = "compressor.coding"
_BOOK, _CODES = ".book", ".codes"
_EVERY = 10  # steps after which weights take other values; after more, too many do so at once
_THERE = 0.5  # share of the steps after which the bytes are to be what the round aims at
_SETTLED = 0.7  # share after which weights keep their values, and the values are trained
_DAMPING = 0.1  # of what an element's row and column are worth, added to its sensitivity
_MOST_DEARER = 2.0  # times the price before
_SCALED = frozenset({"BatchNormalization", "LayerNormalization", "PRelu"})


class _Decode(torch.autograd.Function):
    """Values by code; the gradient goes to the values and, as if not rounded, to the weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, book: Tensor, codes: Tensor) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.size = book.numel()
        return book[codes.long()].to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (codes,) = ctx.saved_tensors
        places = codes.flatten().long()
        values = torch.bincount(places, gradient.flatten(), ctx.size)
        return gradient, values.to(gradient.dtype), None


def _decode(weight: Tensor, book: Tensor, codes: Tensor) -> Tensor:
    decoded: Tensor = _Decode.apply(weight, book, codes)  # type: ignore[no-untyped-call]  # PyTorch's has no types
    return decoded


OPERATORS: Operators = {
    (_DOMAIN, "Decode"): Operator(_decode),
}


@dataclass(frozen=True)
class CodedNetwork:
    """A module that computes with coded weights and vectors.

    Attributes:
        module: takes inputs and returns outputs by name.
        layers: those whose weights are coded, by the name of the weight.
        vectors: names of the biases and other vectors that are coded.
        float_bits: significant bits of the values of codebooks.
    """

    module: NamedModule
    layers: Mapping[str, Layer]
    vectors: tuple[str, ...]
    float_bits: int

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
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what :meth:`state` returned."""
        # Names with dots look to PyTorch as if they were of submodules that it does not have.
        self.module.load_state_dict(dict(tensors), strict=False)

    def codings(self, sensitivities: Mapping[str, Tensor] | None = None) -> dict[str, Coding]:
        """Return the weights as they are coded now, by name.

        They are on the CPU, where sums have one order, wherever the module is trained.
        """
        held = self.module.state_dict()
        found = {}
        for name in self.coded:
            weight, book, codes = (
                held[PREFIX + name + part].detach().cpu() for part in ("", _BOOK, _CODES)
            )
            felt = torch.ones_like(weight) if sensitivities is None else sensitivities[name]
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
        """Let weights be the values that they take: what errors cost is known there."""
        held = self.module.state_dict()
        for name, coding in self.codings().items():
            held[PREFIX + name].copy_(coding.book[coding.codes.long()])

    def nbytes(self) -> float:
        """Return the bytes that weights and vectors take once they are coded."""
        return sum(coding.nbytes for coding in self.codings().values())

    def written(self, carrier: Carrier) -> Carrier:
        """Return the fused model with these codes and vectors."""
        codes = {n: WeightCodes.known(self.layers[n], q) for n, q in self.quantized().items()}
        return carrier.with_weights(self.short_vectors()).with_codes(codes)

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

    Args:
        graph: fused; it is not changed.
        layers: those whose weights are coded, by the name of the weight.
        source: the module that the graph was lowered from.
        bits: width of a code, 1 to 8.
        float_bits: significant bits of vectors and codebooks.
    """
    graph = graph.clone()
    editor = Editor(graph)
    vectors = tuple(name for name, value in graph.graph.initializers.items() if _is_vector(value))
    for name in (*layers, *vectors):
        value = graph.graph.initializers[name]
        assert value.const_value is not None
        coding = first_coding(from_numpy(value.const_value).float(), bits)
        book = editor.constant(name + _BOOK, coding.book.numpy())
        codes = editor.constant(name + _CODES, coding.codes.numpy())
        _decoded(editor, value, book, codes)
    coded = (*layers, *vectors)
    trained = {*coded, *(name + _BOOK for name in coded)}
    executed = trainable_graph(graph, source.module, trained, operators=OPERATORS)
    module = NamedModule(executed, source.inputs, source.outputs)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.removeprefix(PREFIX) in trained)
    return CodedNetwork(module, layers, vectors, float_bits)


def _is_vector(value: ir.Value) -> bool:
    """Whether an initializer is a vector of more than one float that is added or multiplied."""
    tensor = value.const_value
    return (
        tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and len(tensor.shape) == 1
        and tensor.size > 1
        and bool(value.uses())
        and all(_takes_vectors(reader) for reader, _ in value.uses())
    )


def _takes_vectors(node: ir.Node) -> bool:
    """Whether a node adds a vector, or multiplies with it."""
    row = operator(node)
    with_bias = row.is_product and not row.bias_is_separate
    return bool(row.arithmetic) or with_bias or node.op_type in _SCALED


def _decoded(editor: Editor, value: ir.Value, book: ir.Value, codes: ir.Value) -> None:
    """Let all readers of an initializer read what its codes say."""
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


def sensitivities(
    network: CodedNetwork,
    micros: Iterable[tuple[int, Micro]],
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Return what errors of weights do to the outputs, by name, in the weights' shapes.

    The diagonal of the Gauss-Newton matrix of half the squared error of the outputs, for a sample:
    the mean square of the gradient of all outputs, each with a random sign (M. Hutchinson, 1989).
    To learn from a network at a high temperature is to match its outputs so (Hinton et al. 2015,
    arXiv:1503.02531, section 2.1). The loss itself would say little: where all training samples are
    answered well, its gradient is next to nothing. Little is known of a single weight from few
    samples, so a share of what its row and its column say together is added (N. Shazeer and M.
    Stern, Adafactor, 2018, arXiv:1804.04235, section 3).
    """
    module = network.module.eval()
    parameters = dict(module.named_parameters())
    names = network.coded
    wanted = [parameters[PREFIX + name] for name in names]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in wanted]
    signs = torch.Generator().manual_seed(0)
    samples = 0
    for count, (_, micro) in enumerate(micros, 1):
        outputs = module(**{name: micro.tensors[name] for name in module.inputs})
        total = torch.stack(
            [
                (torch.randint(0, 2, out.shape, generator=signs).to(out) * 2 - 1).mul(out).sum()
                for out in outputs.values()
                if out.is_floating_point()
            ]
        ).sum()
        for found, gradient in zip(sums, torch.autograd.grad(total, wanted), strict=True):
            found += gradient.float().square()
        samples += len(micro.rows)
        advance(count)
    means = {name: found / max(samples, 1) for name, found in zip(names, sums, strict=True)}
    return {name: mean + _DAMPING * _rank_one(mean) for name, mean in means.items()}


def _rank_one(values: Tensor) -> Tensor:
    """Return the products of the means of rows and columns that have the same sums, not below."""
    if values.ndim < 2:
        return values.mean().expand(values.shape)
    flat = values.flatten(2) if values.ndim > 2 else values[..., None]
    rows, columns = flat.mean((1, 2), keepdim=True), flat.mean((0, 2), keepdim=True)
    product = rows * columns / flat.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return product.expand(flat.shape).reshape(values.shape)


class CodesTaken(Regulator):
    """Lets weights take other values while they are trained, ever fewer bytes of them.

    The logarithm of the bytes falls, fast at first, to that of what the round aims at. Every time
    that weights choose their values, the price is moved by as much as the bytes are off.

    Args:
        network: its module is what is trained.
        codings: the weights at the beginning, with their sensitivities.
        price: loss for each byte, at the beginning.
        target: bytes that all are to take.
        steps: of the training.
    """

    def __init__(
        self,
        network: CodedNetwork,
        codings: Mapping[str, Coding],
        price: float,
        target: float,
        steps: int,
    ):
        self._network = network
        self._price = torch.tensor(price, dtype=torch.float64)
        self._sensitivities = {name: coding.sensitivity for name, coding in codings.items()}
        self._zeros = {name: coding.zero for name, coding in codings.items()}
        self._begin = sum(coding.nbytes for coding in codings.values())
        self._target = target
        self._there, self._last = _THERE * steps, round(_SETTLED * steps)

    @property
    def price(self) -> float:
        """The price now."""
        return float(self._price)

    def wanted(self, step: int) -> float:
        """Return the bytes that are to be left at a step."""
        left = max(0.0, 1 - step / self._there) ** 2
        return float(self._target * max(1.0, self._begin / self._target) ** left)

    def before(self, step: int) -> None:
        """Choose the value of each weight if it is time to."""
        if step % _EVERY or step >= self._last:
            return
        codings = self._network.codings(self._sensitivities)
        nbytes = sum(coding.nbytes for coding in codings.values())
        dearer = (nbytes / self.wanted(step)) ** 2  # bytes fall by less than the price rises
        self._price *= min(max(dearer, 1 / _MOST_DEARER), _MOST_DEARER)
        price = float(self._price)
        self._network.code(
            {
                name: replace(coding, codes=assigned(coding, price, self._zeros[name]))
                for name, coding in codings.items()
            }
        )

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Make zero zero again."""
        held = self._network.module.state_dict()
        for name, place in self._zeros.items():
            held[PREFIX + name + _BOOK][place] = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Return the price."""
        return {"price": self._price}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the price of the interrupted training."""
        self._price = state["price"]
