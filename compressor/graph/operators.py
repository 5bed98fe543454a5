"""One row for each ONNX operator: all that passes, costs and exporters need to know of it.

To support a new activation everywhere, add its row here and a line to the executor. Code asks the
row of a node, as in ``operator(node).activation``, and keeps no list of names; only mathematics of
operators (channel rules, the executor's kernels) stay where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from compressor.types.layers import LSTM, RECURRENT, LayerKind

if TYPE_CHECKING:
    import onnx_ir as ir

Family = Literal[
    "unary", "cast-like", "binary", "reduction", "spatial", "product", "softmax",
    "channel-norm", "group-norm", "layer-norm", "reshape", "concat", "split", "quantization",
    "shape", "source", "constant", "control", "selection", "other",
]  # fmt: skip
"""Operators of a family have one form: the same inputs matter, and outputs are shaped alike.

``cast-like`` is unary, and its second input only lends its type; ``shape`` reads nothing but an
input's shape; ``source`` makes values of its settings, a ``constant`` holds one; ``control`` holds
subgraphs, and its time is that of the nodes inside; how long a ``selection`` is, its values decide.
"""

Zeros = Literal[
    "kept", "lost", "all", "any", "first", "branches", "parts", "bounds", "repeated", "affine",
    "biased", "factors",
]  # fmt: skip
"""Where an output is zero: where the first input is (``kept``, f(0) = 0), or nowhere (``lost``).

Of several inputs: where ``all`` are zero, where ``any`` is, where the ``first`` is, where both
``branches`` behind the condition are, where the one of the ``parts`` is that lies there. ``bounds``
and padding must allow zero. A constant that is ``repeated`` must be zero. An ``affine`` output is
zero where its scale and shift are; a product where one of its ``factors`` is; a ``biased`` product
only where its bias is, too.
"""

Moves = Literal["", "same", "type", "shape", "order", "some", "padded"]
"""How an output shows the first input's elements: as they are, in another type, shape or order,
only ``some`` of them, or with padding; empty where it computes, or is not looked through.
"""

Float16 = Literal["", "cheap", "sum", "range", "angle", "place", "choice", "codes", "typed", "list"]
"""Why an operator stays in float32 when the rest becomes float16; empty where it need not.

``cheap`` operators take the type of their neighbours, so that nothing is cast twice. The others
are reasons, spelled out by :mod:`compressor.passes.quantize.cast.islands`.
"""

Target = Literal["ort-cpu", "ort-cuda", "openvino", "tensorrt", "tensorrt-rtx", "litert"]
Kernel = Literal["layer", "layer-to-codes", "layer-with-zero", "join", "carrier", "absorbed"]
"""What a runtime does with an operator between QuantizeLinear and DequantizeLinear.

``layer``: it has an integer kernel for a constant weight; ``-to-codes``: only where the output is
quantized as well; ``-with-zero``: only where the weight's zero point is written out. ``join``: it
has an integer kernel without a weight. ``carrier``: codes pass. ``absorbed``: it is taken in.
"""


class Codes(NamedTuple):
    """Which inputs hold codes, their scale and their zero point, and the axis scales run along."""

    codes: int
    scale: int | None
    zero_point: int
    axis: int = 0


@dataclass(frozen=True, eq=False)
class Operator:
    """All facts about one operator that other code needs.

    Attributes:
        name: the ``op_type`` of its nodes.
        family: its form.
        domain: empty for ONNX's own.
        layer: the kind of layer that it is where its weight is constant.
        weight: the input that is the weight.
        recurrent: the kind of layer that it is; its weights are its second and third input.
        integer: it multiplies integer codes.
        packed: several weights lie in one element; attributes say how many.
        codes: where its inputs hold quantized numbers.
        decodes: weights are decoded with it where DequantizeLinear is written out.
        arithmetic: it computes the sum, difference, product or quotient of two values.
        activation: it is an activation function, one input to one output.
        rectifies: f(x) = max(x, 0).
        squares: it takes powers of its first input.
        steep: its slope has no bound near zero, so that it makes large differences of small ones.
        zeros: where its output is zero.
        undefined_at_zero: the input that it divides by, or whose logarithm it takes.
        adds: a reduction that zeros make no difference to.
        moves: how its output shows its input's elements.
        folds: networks compute weights with it, which fusion does ahead.
        free: it moves no memory.
        fused: runtimes compute it while they write the product before it.
        running_statistics: its inputs from the fourth on are no trained parameters.
        follows: it belongs to the layer before it, as every activation does.
        probabilities: it turns logits into (log) probabilities.
        passes_factor: a positive factor of its input is one of its output, and it may lie between a
            scale and the layer that takes it over; what moves values whole does so anyway.
        float16: why it stays in float32.
        bounded: its output is moderate whatever it reads.
        unscaled: its results are integers, which are yet to be scaled.
        between_codes: TensorRT computes it with codes that stand between it and a layer.
        kernels: what runtimes do with it between codes.
        int8_form: ONNX Runtime can keep what it reads and writes in int8.
        branches: what it executes depends on the data.
        random: it draws numbers, at least in training.
    """

    name: str
    family: Family = "other"
    domain: str = ""
    layer: LayerKind | None = None
    weight: int = 1
    recurrent: LayerKind | None = None
    integer: bool = False
    packed: bool = False
    codes: Codes | None = None
    decodes: bool = False
    arithmetic: Literal["", "+", "-", "*", "/"] = ""
    activation: bool = False
    rectifies: bool = False
    squares: bool = False
    steep: bool = False
    zeros: Zeros = "kept"
    undefined_at_zero: int | None = None
    adds: bool = False
    moves: Moves = ""
    folds: bool = False
    free: bool = False
    fused: bool = False
    running_statistics: bool = False
    follows: bool = False
    probabilities: bool = False
    passes_factor: bool = False
    float16: Float16 = ""
    bounded: bool = False
    unscaled: bool = False
    between_codes: bool = False
    kernels: Mapping[Target, Kernel] = field(default_factory=dict)
    int8_form: bool = False
    branches: bool = False
    random: bool = False

    @property
    def quantizes(self) -> bool:
        """Whether it rounds floats to codes by a given scale."""
        return self.family == "quantization" and self.codes is None

    @property
    def dequantizes(self) -> bool:
        """Whether it turns codes into floats by a given scale."""
        return self.family == "quantization" and self.codes is not None

    @property
    def is_table(self) -> bool:
        """Whether rows of the weight are looked up."""
        return self.layer == "Gather"

    @property
    def is_matmul(self) -> bool:
        """Whether it is a product of matrices as they are, of floats or integers."""
        return self.layer == "MatMul"

    @property
    def is_product(self) -> bool:
        """Whether floats are multiplied with the weight."""
        return self.layer is not None and not self.is_table and not self.integer

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution of floats, transposed or not."""
        return self.layer in ("Conv", "ConvTranspose") and not self.integer

    @property
    def transposed_weight(self) -> bool:
        """Whether the weight has its input channels first: a transposed convolution."""
        return self.layer == "ConvTranspose"

    @property
    def bias_is_separate(self) -> bool:
        """Whether it takes no bias, so that a node behind it adds one."""
        return self.is_matmul and not self.integer


OTHER = Operator("")
"""The row of every operator that has none."""

_TO_CODES: Mapping[Target, Kernel] = {"litert": "layer-to-codes"}
_LAYER: Mapping[Target, Kernel] = {**dict.fromkeys(get_args(Target), "layer"), **_TO_CODES}
_JOIN: Mapping[Target, Kernel] = {"ort-cpu": "join", "litert": "join"}
_SUM: Mapping[Target, Kernel] = {target: "join" for target in _LAYER if target != "ort-cuda"}
_CARRIER: Mapping[Target, Kernel] = dict.fromkeys(("ort-cpu", "openvino", "litert"), "carrier")
_MS = "com.microsoft"
RESIZE = "Resize"

# fmt: off
_ROWS = (  # products and lookups first
    Operator("Conv", "product", layer="Conv", zeros="biased",
             kernels={**_LAYER, "ort-cpu": "layer-to-codes"}, int8_form=True),
    Operator("ConvTranspose", "product", layer="ConvTranspose", zeros="biased",
             kernels={"tensorrt": "layer", "openvino": "layer", **_TO_CODES}, int8_form=True),
    Operator("Gemm", "product", layer="Gemm", zeros="biased",
             kernels={**_LAYER, "ort-cpu": "layer-with-zero"}, int8_form=True),
    Operator("MatMul", "product", layer="MatMul", zeros="factors", kernels=_LAYER, int8_form=True),
    Operator("Einsum", "product", zeros="factors"), Operator("QLinearConv", codes=Codes(3, 4, 5)),
    Operator("ConvInteger", layer="Conv", integer=True, codes=Codes(1, None, 3), unscaled=True),
    Operator("MatMulInteger", layer="MatMul", integer=True, codes=Codes(1, None, 3, axis=-1),
             unscaled=True), Operator("QGemm", domain=_MS, integer=True),
    Operator("MatMulIntegerToFloat", domain=_MS, layer="MatMul", integer=True,
             codes=Codes(1, 3, 5, axis=-1)), Operator("MatMulNBits", domain=_MS, packed=True),
    Operator("QLinearMatMul", codes=Codes(3, 4, 5, axis=-1)),
    Operator("Gather", layer="Gather", weight=0, folds=True, float16="cheap"),
    *(Operator(kind, recurrent=kind, zeros="lost") for kind in RECURRENT),
    Operator("DynamicQuantizeLSTM", domain=_MS, recurrent=LSTM, integer=True),
    # activations
    Operator("Relu", "unary", activation=True, rectifies=True, fused=True, passes_factor=True,
             float16="cheap", between_codes=True, kernels=dict.fromkeys(_LAYER, "absorbed"),
             int8_form=True),
    Operator("LeakyRelu", "unary", activation=True, fused=True, passes_factor=True, float16="cheap",
             between_codes=True, kernels=_JOIN, int8_form=True),
    Operator("PRelu", "binary", activation=True, zeros="first", passes_factor=True),
    Operator("Elu", "unary", activation=True), Operator("Selu", "unary", activation=True),
    Operator("Celu", "unary", activation=True), Operator("Erf", "unary", activation=True),
    Operator("ThresholdedRelu", "unary", activation=True),
    Operator("Softsign", "unary", activation=True),
    Operator("Gelu", "unary", activation=True, between_codes=True),
    Operator("Sigmoid", "unary", activation=True, zeros="lost", folds=True, float16="cheap",
             bounded=True, between_codes=True, kernels=_JOIN, int8_form=True),
    Operator("HardSigmoid", "unary", activation=True, zeros="lost", between_codes=True),
    Operator("HardSwish", "unary", activation=True, between_codes=True, kernels={"litert": "join"}),
    Operator("Mish", "unary", activation=True), Operator("Swish", "unary", activation=True),
    Operator("Softplus", "unary", activation=True, zeros="lost", folds=True),
    Operator("Tanh", "unary", activation=True, folds=True, float16="cheap", bounded=True,
             between_codes=True),
    Operator("Clip", "unary", activation=True, zeros="bounds", fused=True, float16="cheap",
             bounded=True, between_codes=True,
             kernels=dict.fromkeys(("ort-cpu", "openvino", "litert"), "absorbed"), int8_form=True),
    # other functions of one element
    Operator("Abs", "unary", folds=True, float16="cheap"),
    Operator("Neg", "unary", folds=True, follows=True, float16="cheap"),
    Operator("Sqrt", "unary", steep=True, folds=True, follows=True, float16="range"),
    Operator("Reciprocal", "unary", zeros="lost", undefined_at_zero=0, folds=True, float16="range"),
    Operator("Exp", "unary", zeros="lost", folds=True, follows=True, float16="range"),
    Operator("Log", "unary", steep=True, zeros="lost", undefined_at_zero=0, folds=True,
             float16="range"),
    Operator("Asin", "unary"), Operator("Atan", "unary"), Operator("Shrink", "unary"),
    Operator("Ceil", "unary"), Operator("Floor", "unary"), Operator("Round", "unary"),
    Operator("Acos", "unary", zeros="lost"), Operator("BitwiseNot", "unary", zeros="lost"),
    Operator("Sin", "unary", float16="angle"), Operator("Tan", "unary", float16="angle"),
    Operator("Cos", "unary", zeros="lost", float16="angle"), Operator("Acosh", "unary"),
    Operator("Cosh", "unary", zeros="lost", float16="range"), Operator("Asinh", "unary"),
    Operator("Sinh", "unary", float16="range"), Operator("Not", "unary", zeros="lost"),
    Operator("Sign", "unary", float16="cheap", bounded=True), Operator("Atanh", "unary"),
    *(Operator(name, "unary", zeros="lost", float16="cheap") for name in ("IsNaN", "IsInf")),
    Operator("Cast", "unary", decodes=True, moves="type", follows=True, float16="cheap"),
    Operator("CastLike", "cast-like", float16="typed"),
    Operator("Identity", "unary", moves="same", free=True, follows=True, float16="cheap"),
    Operator("Dropout", "unary", passes_factor=True, follows=True, float16="cheap", random=True),
    # functions of several elements
    Operator("Add", "binary", arithmetic="+", zeros="all", folds=True, follows=True,
             float16="cheap", kernels=_SUM, int8_form=True),
    Operator("Sub", "binary", decodes=True, arithmetic="-", zeros="all", folds=True, follows=True,
             float16="cheap"),
    Operator("Mul", "binary", decodes=True, arithmetic="*", zeros="any", folds=True, follows=True,
             float16="cheap", kernels=_JOIN, int8_form=True),
    Operator("Div", "binary", arithmetic="/", zeros="first", undefined_at_zero=1, folds=True,
             follows=True, float16="cheap"),
    Operator("Pow", "binary", squares=True, zeros="first", undefined_at_zero=0, folds=True,
             follows=True, float16="range"),
    Operator("Mod", "binary", zeros="first", undefined_at_zero=1), Operator("BitShift", "binary"),
    Operator("Min", "binary", zeros="all", follows=True, float16="cheap"),
    Operator("Max", "binary", zeros="all", follows=True, float16="cheap"),
    Operator("Mean", "binary", zeros="all"),
    Operator("Sum", "binary", zeros="all", float16="cheap"),
    Operator("Where", "binary", zeros="branches", float16="cheap"),
    *(Operator(name, "binary", zeros="lost", float16="cheap")
      for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    Operator("And", "binary", zeros="any"), Operator("Or", "binary", zeros="all"),
    Operator("Xor", "binary", zeros="all"), Operator("BitwiseXor", "binary", zeros="all"),
    Operator("BitwiseAnd", "binary", zeros="any"), Operator("BitwiseOr", "binary", zeros="all"),
    # reductions
    Operator("ReduceMean", "reduction", folds=True, passes_factor=True, float16="sum",
             between_codes=True, int8_form=True),
    Operator("ReduceSum", "reduction", adds=True, folds=True, passes_factor=True, float16="sum"),
    Operator("ReduceMax", "reduction", folds=True), Operator("ReduceMin", "reduction"),
    Operator("ReduceProd", "reduction", float16="range"),
    Operator("ReduceL1", "reduction", adds=True, float16="sum"),
    Operator("ReduceL2", "reduction", steep=True, adds=True, folds=True, float16="sum"),
    Operator("ReduceLogSum", "reduction", zeros="lost", undefined_at_zero=0, float16="sum"),
    Operator("ReduceLogSumExp", "reduction", zeros="lost", float16="sum"),
    Operator("ReduceSumSquare", "reduction", squares=True, adds=True, folds=True, float16="sum"),
    *(Operator(x, "reduction", zeros="lost", float16="choice") for x in ("ArgMax", "ArgMin")),
    # pooling and resampling
    Operator("MaxPool", "spatial", moves="some", kernels=_CARRIER, int8_form=True),
    Operator("AveragePool", "spatial", between_codes=True, kernels=_SUM, int8_form=True),
    Operator("GlobalAveragePool", "spatial", float16="sum", between_codes=True, kernels=_SUM,
             int8_form=True),
    Operator("GlobalMaxPool", "spatial"), Operator("GlobalLpPool", "spatial", float16="sum"),
    Operator(RESIZE, "spatial", float16="place", between_codes=True, int8_form=True),
    Operator("Upsample", "spatial", float16="place"), Operator("LpPool", "spatial"),
    Operator("GridSample", "spatial", float16="place"),
    # normalizations
    Operator("Softmax", "softmax", zeros="lost", probabilities=True, float16="sum", int8_form=True),
    Operator("LogSoftmax", "softmax", zeros="lost", probabilities=True, float16="sum"),
    Operator("Hardmax", "softmax", zeros="lost"),
    Operator("LpNormalization", "softmax", float16="sum"), Operator("CumSum", float16="sum"),
    Operator("BatchNormalization", "channel-norm", zeros="affine", fused=True,
             running_statistics=True, follows=True),
    Operator("InstanceNormalization", "channel-norm", zeros="affine", follows=True, float16="sum"),
    Operator("GroupNormalization", "group-norm", zeros="lost", follows=True),
    Operator("LayerNormalization", "layer-norm", zeros="affine", follows=True),
    Operator("RMSNormalization", "layer-norm", zeros="affine", follows=True),
    Operator("SimplifiedLayerNormalization", "layer-norm", zeros="affine"),
    Operator("LRN", float16="sum"), Operator("MeanVarianceNormalization", float16="sum"),
    # moves, choices and repetitions
    Operator("Reshape", "reshape", decodes=True, moves="shape", free=True, float16="cheap",
             kernels=_CARRIER),
    Operator("Flatten", "reshape", moves="shape", free=True, float16="cheap", kernels=_CARRIER,
             int8_form=True),
    Operator("Squeeze", "reshape", moves="shape", free=True, float16="cheap", kernels=_CARRIER),
    Operator("Unsqueeze", "reshape", moves="shape", free=True, float16="cheap", kernels=_CARRIER),
    Operator("Transpose", moves="order", float16="cheap", kernels=_CARRIER, int8_form=True),
    Operator("Concat", "concat", zeros="parts", folds=True, float16="cheap",
             kernels={**_JOIN, "openvino": "join"}, int8_form=True),
    Operator("Split", "split", folds=True, passes_factor=True, float16="cheap", int8_form=True),
    Operator("Slice", moves="some", folds=True, passes_factor=True, float16="cheap",
             kernels=_CARRIER, int8_form=True),
    *(Operator(name, float16="cheap")
      for name in ("GatherElements", "GatherND", "ScatterElements", "ScatterND")),
    Operator("Pad", zeros="bounds", moves="padded", float16="cheap", kernels=_CARRIER,
             int8_form=True),
    Operator("Expand", zeros="repeated", passes_factor=True, float16="cheap"),
    Operator("Tile", float16="cheap"), Operator("Trilu", float16="cheap"),
    Operator("DepthToSpace", float16="cheap"), Operator("SpaceToDepth", float16="cheap"),
    # quantization
    Operator("QuantizeLinear", "quantization", zeros="lost", follows=True, float16="codes"),
    Operator("DequantizeLinear", "quantization", codes=Codes(0, 1, 2, axis=1), zeros="lost",
             follows=True, float16="codes"),
    Operator("DynamicQuantizeLinear", float16="codes", unscaled=True),
    # constants, shapes, numbers made of nothing
    Operator("Constant", "constant", free=True), Operator("ConstantOfShape", zeros="repeated"),
    Operator("Shape", "shape", free=True), Operator("Size", "shape", free=True),
    Operator("Range", "source", float16="place"), Operator("Scan", "control"),
    Operator("RandomNormal", "source", float16="typed", random=True),
    Operator("RandomUniform", "source", float16="typed", random=True),
    Operator("If", "control", branches=True), Operator("Loop", "control", branches=True),
    # known for what float16 does to them
    Operator("AffineGrid", float16="place"), Operator("Bernoulli", float16="typed", random=True),
    Operator("ConcatFromSequence", float16="list"), Operator("DFT", float16="sum"),
    Operator("Det", float16="sum"), Operator("EyeLike", float16="typed"),
    Operator("MaxRoiPool", float16="place"), Operator("MelWeightMatrix", float16="place"),
    Operator("Multinomial", float16="typed", random=True), Operator("TopK", float16="choice"),
    Operator("NegativeLogLikelihoodLoss", float16="sum"),
    Operator("NonMaxSuppression", "selection", float16="place"), Operator("NonZero", "selection"),
    Operator("Compress", "selection", float16="cheap"), Operator("Unique", "selection"),
    Operator("OptionalGetElement", float16="list"), Operator("RoiAlign", float16="place"),
    Operator("RandomNormalLike", float16="typed", random=True),
    Operator("RandomUniformLike", float16="typed", random=True), Operator("STFT", float16="sum"),
    *(Operator(name, float16="list") for name in ("SequenceAt", "SequenceConstruct", "Optional",
      "SequenceEmpty", "SequenceErase", "SequenceInsert")),
    Operator("SoftmaxCrossEntropyLoss", float16="sum"), Operator("SplitToSequence", float16="list"),
)
# fmt: on

OPERATORS: Mapping[str, Operator] = {row.name: row for row in _ROWS}


def operator(node: ir.Node | None) -> Operator:
    """Return the row of a node's operator, :data:`OTHER` where there is none in its domain.

    >>> operator(ir.node("Relu", [value])).activation
    True
    """
    if node is None:
        return OTHER
    row = OPERATORS.get(node.op_type, OTHER)
    return row if row.domain == ("" if node.domain == "ai.onnx" else node.domain) else OTHER


def operator_named(op_type: str) -> Operator:
    """Return the row of a name, whatever the domain; :data:`OTHER` where there is none."""
    return OPERATORS.get(op_type, OTHER)


def names(where: Callable[[Operator], bool]) -> tuple[str, ...]:
    """Return the names of the operators for which something holds, in the table's order.

    >>> names(lambda row: row.layer == "MatMul")
    ('MatMul', 'MatMulInteger', 'MatMulIntegerToFloat')
    """
    return tuple(row.name for row in OPERATORS.values() if where(row))
