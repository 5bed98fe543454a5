"""A network whose weights are computed of codebooks and codes while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from compressor.graph.editing import Editor
from compressor.models.element_types import from_numpy
from compressor.models.executor.node import Operator, Operators
from compressor.models.torch.lowering import NamedModule
from compressor.models.torch.smaller_module import trainable_graph
from compressor.passes.quantize.maths.floating import shortened
from compressor.passes.train.archive.coding import Coding, assigned, first_coding
from compressor.passes.train.job import PREFIX, Micro, Objective, Regulator
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, QuantizedTensor, Scheme, WeightCodes

_DOMAIN = "compressor.coding"
_BOOK, _CODES = ".book", ".codes"
_EVERY = 10  # steps after which weights take other values
_SETTLED = 0.7  # share of the steps after which they keep theirs, and the values are trained
_DAMPING = 0.1  # of the mean sensitivity of a weight's elements, added to each


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


def _shorten(values: Tensor, *, bits: int) -> Tensor:
    return values + (shortened(values.detach(), bits) - values.detach())


OPERATORS: Operators = {
    (_DOMAIN, "Decode"): Operator(_decode),
    (_DOMAIN, "Shorten"): Operator(_shorten),
}


@dataclass(frozen=True)
class CodedNetwork:
    """A module that computes with coded weights and with vectors of few bits.

    Attributes:
        module: takes inputs and returns outputs by name.
        layers: those whose weights are coded, by the name of the weight.
        vectors: names of the biases and other vectors that are trained and shortened.
        float_bits: significant bits of vectors and of codebooks.
    """

    module: NamedModule
    layers: Mapping[str, Layer]
    vectors: tuple[str, ...]
    float_bits: int

    @property
    def books(self) -> frozenset[str]:
        """The parameters that are codebooks, by the module's names."""
        return frozenset(PREFIX + name + _BOOK for name in self.layers)

    def state(self) -> dict[str, Tensor]:
        """Return copies of all parameters and buffers."""
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what :meth:`state` returned."""
        # Names with dots look to PyTorch as if they were of submodules that it does not have.
        self.module.load_state_dict(dict(tensors), strict=False)

    def codings(self, sensitivities: Mapping[str, Tensor] | None = None) -> dict[str, Coding]:
        """Return the weights as they are coded now, by name."""
        held = self.module.state_dict()
        found = {}
        for name in self.layers:
            weight = held[PREFIX + name].detach().float()
            given = None if sensitivities is None else sensitivities[name]
            found[name] = Coding(
                weight,
                held[PREFIX + name + _BOOK].detach(),
                held[PREFIX + name + _CODES],
                torch.ones_like(weight) if given is None else given.to(weight.device),
            )
        return found

    @torch.no_grad()
    def code(self, codings: Mapping[str, Coding]) -> None:
        """Take other values and codes."""
        held = self.module.state_dict()
        for name, coding in codings.items():
            held[PREFIX + name + _BOOK].copy_(coding.book)
            held[PREFIX + name + _CODES].copy_(coding.codes)

    def nbytes(self) -> float:
        """Return the bytes that weights and vectors take once they are coded."""
        held = self.module.state_dict()
        vectors = sum(int(held[PREFIX + name].numel()) for name in self.vectors)
        weights = sum(coding.nbytes for coding in self.codings().values())
        # Of a sign and the eight bits of an exponent, about four are left once they are coded.
        return float(weights + vectors * (self.float_bits + 4) / 8)

    def written(self, carrier: Carrier) -> Carrier:
        """Return the fused model with these codes and vectors."""
        codes = {n: WeightCodes.known(self.layers[n], q) for n, q in self.quantized().items()}
        return carrier.with_weights(self.short_vectors()).with_codes(codes)

    def quantized(self) -> dict[str, QuantizedTensor]:
        """Return the codes of each weight, in values that are taken and in rising order."""
        return {
            name: _quantized(self.layers[name], coding, self.float_bits)
            for name, coding in self.codings().items()
        }

    def short_vectors(self) -> dict[str, Tensor]:
        """Return the vectors in their few bits."""
        held = self.module.state_dict()
        return {n: shortened(held[PREFIX + n].detach(), self.float_bits) for n in self.vectors}


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
    for name in layers:
        value = graph.graph.initializers[name]
        assert value.const_value is not None
        coding = first_coding(from_numpy(value.const_value).float(), bits)
        book = editor.constant(name + _BOOK, coding.book.numpy())
        codes = editor.constant(name + _CODES, coding.codes.numpy())
        _put(editor, value, "Decode", [book, codes], {})
    vectors = tuple(name for name, value in graph.graph.initializers.items() if _is_vector(value))
    vectors = tuple(name for name in vectors if not name.endswith(_BOOK))
    for name in vectors:
        _put(editor, graph.graph.initializers[name], "Shorten", [], {"bits": float_bits})
    trained = {*layers, *vectors, *(name + _BOOK for name in layers)}
    executed = trainable_graph(graph, source.module, trained, operators=OPERATORS)
    module = NamedModule(executed, source.inputs, source.outputs)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.removeprefix(PREFIX) in trained)
    return CodedNetwork(module, layers, vectors, float_bits)


def _is_vector(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and len(tensor.shape) == 1
        and tensor.size > 1
    )


def _put(
    editor: Editor,
    value: ir.Value,
    op_type: str,
    operands: Sequence[ir.Value],
    attributes: Mapping[str, int],
) -> None:
    """Let all readers of an initializer read what an operator makes of it."""
    readers, first = tuple(value.uses()), editor.first_reader(value)
    if first is None:
        return
    name = editor.free_name(f"{value.name}.{op_type}")
    output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
    inputs = [value, *operands]
    node = ir.node(op_type, inputs, attributes, domain=_DOMAIN, outputs=[output], name=name)
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
    objective: Objective,
    micros: Iterable[tuple[int, Micro]],
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Return what errors of weights cost, by name, in the weights' shapes.

    The diagonal of the Fisher information: the mean square of the loss's gradient, of few samples
    at a time, times their number. Each of ``micros`` has the step that it belongs to.
    """
    module = network.module.eval()
    parameters = dict(module.named_parameters())
    names = list(network.layers)
    wanted = [parameters[PREFIX + name] for name in names]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in wanted]
    count = 0
    for count, (step, micro) in enumerate(micros, 1):
        inputs = {name: micro.tensors[name] for name in module.inputs}
        terms = objective.losses(module(**inputs), micro, step)
        loss = torch.stack([each.mean() for each in terms.values()]).sum()
        for total, gradient in zip(sums, torch.autograd.grad(loss, wanted), strict=True):
            total += gradient.float().square() * len(micro.rows)
        advance(count)
    found = {}
    for name, total in zip(names, sums, strict=True):
        mean = total / max(count, 1)
        found[name] = mean + _DAMPING * mean.mean()
    return found


class CodesTaken(Regulator):
    """Lets weights take other values while they are trained, and keeps zero at zero.

    Args:
        network: its module is what is trained.
        codings: the weights at the beginning, with their sensitivities.
        price: loss for each byte.
        steps: of the training.
    """

    def __init__(
        self, network: CodedNetwork, codings: Mapping[str, Coding], price: float, steps: int
    ):
        self._network, self._price = network, price
        self._sensitivities = {name: coding.sensitivity for name, coding in codings.items()}
        self._zeros = {name: coding.zero for name, coding in codings.items()}
        self._last = round(_SETTLED * steps)

    def before(self, step: int) -> None:
        """Choose the value of each weight if it is time to."""
        if step % _EVERY or step >= self._last:
            return
        codings = self._network.codings(self._sensitivities)
        self._network.code(
            {
                name: replace(coding, codes=assigned(coding, self._price, self._zeros[name]))
                for name, coding in codings.items()
            }
        )

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Make zero zero again."""
        held = self._network.module.state_dict()
        for name, place in self._zeros.items():
            held[PREFIX + name + _BOOK][place] = 0.0
