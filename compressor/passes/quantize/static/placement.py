"""Where a runtime fuses Q/DQ into integer kernels: one small table for each target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from compressor.graph.layers import activation_input
from compressor.graph.operators import Kernel, Target, names, operator
from compressor.graph.pools import counts_beyond
from compressor.graph.values import constant_array, constant_of, origin, sole_reader
from compressor.passes.quantize.static.latency_facts import ORT_CPU_LATENCIES, Latency
from compressor.types.layer_rules import TOO_WIDE
from compressor.types.layers import Layer, Scheme

_BYTE = 8
_LAYERS = ("layer", "layer-to-codes", "layer-with-zero")


@dataclass(frozen=True)
class ActivationCode:
    """How one activation is quantized."""

    scale: float  # step between codes
    zero_point: int  # code of zero
    dtype: ir.DataType  # type of the codes
    # for codes narrower than their type: least and greatest value that is represented. Runtimes
    # have kernels for 8-bit activations only, so 4-bit ones are clipped to 16 values and kept in
    # bytes
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Profile:
    """What a runtime does with quantized tensors.

    Which operators have integer kernels, and on what terms, is in the table of operators.
    """

    target: Target  # the runtime's column in the table
    integer_bias: bool  # biases are stored as int32 codes, where the weight has 8 bits
    unsigned: bool  # asymmetric activations are uint8; where false, activations must be symmetric
    saturates: bool = False  # on x86 CPUs without VNNI, where pairs of products overflow
    missing: str = ""  # why a product without an integer kernel stays in floating point
    latencies: tuple[Latency, ...] = ()  # how fast its kernels are, by kind of CPU, if known

    def kernel(self, node: ir.Node | None) -> Kernel | None:
        """Return what the runtime does with a node between codes; ``None`` if it takes floats."""
        return operator(node).kernels.get(self.target)

    def stores_bias(self, node: ir.Node, weight: Scheme) -> bool:
        """Whether the bias beside a weight is stored as codes, too.

        Codes with a scale each take twice the bytes of a float bias. Who takes narrower weights
        wants a small file; ONNX Runtime makes the codes of convolutions when it loads it.
        """
        itself = self.kernel(node) == "layer-to-codes" and weight.bits < _BYTE
        return self.integer_bias and not itself

    @property
    def layers(self) -> frozenset[str]:
        """Operators with a constant weight that have an integer kernel."""
        return frozenset(names(lambda row: row.kernels.get(self.target, "") in _LAYERS))

    @property
    def explicit_zero(self) -> frozenset[str]:
        """Operators whose integer kernel wants the weight's zero point written out."""
        return frozenset(names(lambda row: row.kernels.get(self.target) == "layer-with-zero"))

    @property
    def kept(self) -> Mapping[str, str]:
        """Why products stay in floating point."""
        products = names(lambda row: row.is_product) if self.missing else ()
        return {name: self.missing for name in products if name not in self.layers}


_MISSING = "ONNX Runtime has no integer kernel for it"

# ONNX Runtime, CPU provider: QLinearConv, QGemm, MatMulIntegerToFloat, QLinearAdd/Mul/Concat,
# QLinearAveragePool/GlobalAveragePool, QLinearSigmoid/LeakyRelu. Relu and Clip before a
# QuantizeLinear are dropped, since saturation does the same.
ORT_CPU = Profile(
    "ort-cpu",
    integer_bias=True,
    unsigned=True,
    saturates=True,
    missing=_MISSING,
    latencies=ORT_CPU_LATENCIES,
)

# TensorRT: explicit quantization; the builder moves Q/DQ over data movement by itself, adds a
# residual in the convolution's epilogue, and wants float biases and zero points 0.
TENSORRT = Profile("tensorrt", integer_bias=False, unsigned=False)
TENSORRT_RTX = replace(
    TENSORRT, target="tensorrt-rtx", missing="TensorRT-RTX has no integer kernel for it"
)

# OpenVINO, CPU plugin 2026.4, by the precisions that its compiled model reports for ResNet-20: a
# layer with a float output is int8 all the same, and a residual sum goes into the convolution
# before it. Biases in float save it a conversion.
OPENVINO = Profile("openvino", integer_bias=False, unsigned=True, saturates=True)

# ONNX Runtime, CUDA provider: it has kernels for Q/DQ and none for products of integers, so that
# every Q/DQ that is not there is time saved; int32 biases would be computed on the CPU.
ORT_CUDA = Profile("ort-cuda", integer_bias=False, unsigned=True, missing=_MISSING)

# LiteRT, interpreter 2.3 with XNNPACK: an operator between codes reads and writes int8, and one
# result of floats makes all of its inputs floats. Sums of products are exact on every CPU.
LITERT = Profile("litert", integer_bias=True, unsigned=True)

_ALL = (TENSORRT_RTX, TENSORRT, LITERT, ORT_CPU, OPENVINO, ORT_CUDA)
PROFILES: Mapping[str, Profile] = {p.target: p for p in _ALL}
"""By target; what suits one suits all that come after it."""


def profile_for(targets: frozenset[str]) -> Profile:
    """Return the rules to follow: the strictest of the targets', ONNX Runtime's without one."""
    named = [profile for target, profile in PROFILES.items() if target in targets]
    if not named:
        return ORT_CPU
    saturates = any(profile.saturates for profile in named)
    return named[0] if named[0].saturates == saturates else replace(named[0], saturates=saturates)


_WANTED_BY = {"litert": "phones (litert, executorch or coreml)", "tensorrt-rtx": "tensorrt"}


def kernel_notes(targets: frozenset[str], symmetric: bool) -> tuple[str, ...]:
    """Return what a target is slow with."""
    notes = []
    strictest = profile_for(targets)
    if "ort-cpu" in targets and not strictest.latencies:
        wanted_by = _WANTED_BY.get(strictest.target, strictest.target)
        notes.append(
            f"the export for {wanted_by} wants all layers in integers, also where ONNX Runtime is "
            "faster with floats: for speed in ort-cpu, give it a spec of its own"
        )
    if "ort-cpu" in targets and symmetric:
        notes.append(
            "symmetric int8 activations run slower than uint8 in ONNX Runtime on most CPUs"
        )
    if "ort-cuda" in targets:
        notes.append(
            "ONNX Runtime's CUDA provider has no integer kernels for Q/DQ: smaller, not faster; "
            "cast to fp16 is faster there"
        )
    return tuple(notes)


@dataclass(frozen=True)
class Placement:
    """Which values get Q/DQ and which nodes read them."""

    values: tuple[str, ...]  # names of the values to quantize, in the order of execution
    # the layers that become integer, with the value each reads
    layers: tuple[tuple[Layer, str], ...]
    carried: frozenset[str]  # names of the nodes that work on codes
    # for values that only matter where another value is positive, that value
    gates: Mapping[str, str]
    # for values to quantize, the names of the layers that read their codes
    readers: Mapping[str, tuple[str, ...]]
    joins: frozenset[ir.Node]  # nodes without a weight that become integer
    joined: Mapping[str, str]  # for parts of a quantized Concat, the value whose step they have


class _Placer:
    def __init__(self, model: ir.Model, profile: Profile, chosen: Collection[ir.Node] | None):
        self.graph = model.graph
        self.profile = profile
        self.chosen = chosen
        self.wanted: set[ir.Value] = set()
        self.integer: set[ir.Node] = set()
        self.layers: list[tuple[Layer, str]] = []
        self.readers: dict[str, list[str]] = {}

    def run(self, names: Collection[str], readers: Mapping[ir.Node, Layer]) -> Placement:
        for node, layer in readers.items():
            if layer.name in names and node.graph is self.graph:
                self._want_layer(node, layer)
        joins = [n for n in self.graph if self.profile.kernel(n) == "join" and computes_join(n)]
        for node in joins:
            if self.chosen is not None and node in self.chosen:
                self._make_integer(node)
        changed = self.chosen is None
        while changed:
            joined = [self._want_join(n) for n in joins if n not in self.integer]
            changed = any(joined)
        order = [*self.graph.inputs, *(v for n in self.graph for v in n.outputs)]
        return Placement(
            values=tuple(v.name or "" for v in order if v in self.wanted),
            layers=tuple(self.layers),
            carried=frozenset(n.name or "" for n in self._carried()),
            gates={v.name or "": g for v in self.wanted if (g := _gate(v)) is not None},
            readers={name: tuple(layers) for name, layers in self.readers.items()},
            joins=frozenset(n for n in joins if n in self.integer),
            joined=_joined_values(self.wanted, self._moves, self._absorbing),
        )

    def _want_layer(self, node: ir.Node, layer: Layer) -> None:
        value = float_input(node)
        if value is None:
            return
        root = origin(value, self._moves)
        self._want(root)
        self.readers.setdefault(root.name or "", []).append(layer.name)
        self.integer.add(node)
        self.layers.append((layer, value.name or ""))
        if self.profile.kernel(node) == "layer-to-codes":
            self.wanted.add(self._absorbing(node))

    def _want_join(self, node: ir.Node) -> bool:
        """Make a join integer where its output is to be quantized and its inputs can be."""
        if origin(self._absorbing(node), self._moves) not in self.wanted:
            return False
        roots = [origin(v, self._moves) for v in node.inputs if v is not None]
        if not all(r in self.wanted or self._can_emit(r) for r in roots):
            return False
        self._make_integer(node)
        return True

    def _make_integer(self, node: ir.Node) -> None:
        for value in (*node.inputs, self._absorbing(node)):
            if value is not None:
                self._want(origin(value, self._moves))
        self.integer.add(node)

    def _want(self, value: ir.Value) -> None:
        if quantized_source(value) is None:
            self.wanted.add(value)

    def _can_emit(self, value: ir.Value) -> bool:
        if quantized_source(value) is not None:
            return True
        node = value.producer()
        absorbed = self.profile.kernel(node) == "absorbed"
        if absorbed and node is not None and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        return node is not None and (node in self.integer or self.profile.kernel(node) == "join")

    def _moves(self, node: ir.Node) -> bool:
        if self.profile.kernel(node) != "carrier" or len(node.outputs) != 1:
            return False
        if self.chosen is not None and node not in self.chosen:
            return False
        if operator(node).moves != "padded":
            return True
        mode = node.attributes.get_string("mode", "constant")
        fill = node.inputs[2] if len(node.inputs) > 2 else None
        filled = None if fill is None else constant_array(fill)
        zero = fill is None or (filled is not None and not np.any(filled))
        return mode != "constant" or zero

    def _absorbing(self, node: ir.Node) -> ir.Value:
        return absorbing(node, self.profile)

    def _carried(self) -> set[ir.Node]:
        """Return the nodes between quantized values and integer nodes: they only move elements."""
        carried: set[ir.Node] = set()
        for reader in self.integer:
            for value in reader.inputs:
                node = None if value is None else value.producer()
                while node is not None and self._moves(node) and node.inputs[0] is not None:
                    carried.add(node)
                    node = node.inputs[0].producer()
        return carried


def place(
    model: ir.Model,
    profile: Profile,
    names: Collection[str],
    readers: Mapping[ir.Node, Layer],
    chosen: Collection[ir.Node] | None = None,
) -> Placement:
    """Choose the values to quantize.

    Layers' inputs are quantized, and outputs where the integer kernel needs it. Joins (residual
    adds, concats, pooling) become integer where everything around them is; what only moves
    elements then works on codes. Where joins and moves are ``chosen``, they are the ones.

    ``readers`` names the layer that each node multiplies with, in the order of execution. Subgraphs
    stay in floating point.
    """
    return _Placer(model, profile, chosen).run(names, readers)


def _joined_values(
    wanted: Collection[ir.Value],
    moves: Callable[[ir.Node], bool],
    absorbing: Callable[[ir.Node], ir.Value],
) -> dict[str, str]:
    """Return values that nothing but a ``Concat`` reads whose output is quantized, with that.

    The output has one step for all of its parts. A part with a finer step of its own is rounded
    twice, and gains nothing; and where later samples leave the part's range, it is clipped at
    values that the output would hold.

    Args:
        wanted: the values that are quantized.
        moves: whether a node only moves elements of codes.
        absorbing: returns what a node writes, after the activation that its kernel takes in.
    """

    def output(value: ir.Value) -> ir.Value | None:
        reader = sole_reader(value)
        while reader is not None and moves(reader) and reader.inputs[0] is value:
            value = reader.outputs[0]
            reader = sole_reader(value)
        if reader is None or operator(reader).family != "concat":
            return None
        whole = absorbing(reader)
        return whole if whole in wanted else None

    found = dict[str, str]()
    for value in wanted:
        whole = output(value)
        while whole is not None:  # a part of a part has the step of the last whole
            found[value.name or ""] = whole.name or ""
            whole = output(whole)
    return found


def computed_inputs(node: ir.Node) -> set[ir.Value]:
    """Return what a node reads that is no constant."""
    return {v for v in node.inputs if v is not None and constant_of(v) is None}


def absorbing(node: ir.Node, profile: Profile) -> ir.Value:
    """Return what a node writes, after the activation that its kernel takes in."""
    value = node.outputs[0]
    reader = sole_reader(value)
    if reader is None or profile.kernel(reader) != "absorbed":
        return value
    return reader.outputs[0]


def computes_join(node: ir.Node) -> bool:
    """Whether a node that may be integer can be: all that it reads are floats that are computed."""
    inputs = {v for v in node.inputs if v is not None}
    computed = inputs == computed_inputs(node) and all(map(_is_float, inputs))
    return computed and not counts_beyond(node)


def quantized_source(value: ir.Value) -> ir.Node | None:
    """Return the ``DequantizeLinear`` of one scale that writes an activation, if it is one."""
    node = value.producer()
    if node is None or not operator(node).dequantizes or len(node.inputs) < 2:
        return None
    scale = constant_array(node.inputs[1])
    single = scale is not None and scale.size == 1 and constant_of(node.inputs[0]) is None
    return node if single else None


def float_input(node: ir.Node) -> ir.Value | None:
    """Return the float activation that a layer's node reads first, if it does."""
    value = activation_input(node)
    return value if value is not None and _is_float(value) else None


def why_not_placed(node: ir.Node | None) -> str:
    """Return why what a layer reads cannot be quantized."""
    read = () if node is None else node.inputs
    if any(value is not None and value.dtype is ir.DataType.DOUBLE for value in read):
        return f"it computes in float64{TOO_WIDE}"
    return "it reads no float value of the main graph"


def _gate(value: ir.Value) -> str | None:
    """Return the output of the ReLU behind the one addition that reads the value.

    Where that is zero, the sum was negative, and the value's exact size made no difference.
    """
    add = sole_reader(value)
    if add is None or operator(add).arithmetic != "+":
        return None
    relu = sole_reader(add.outputs[0])
    return relu.outputs[0].name if relu is not None and operator(relu).rectifies else None


def _is_float(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype == ir.DataType.FLOAT
