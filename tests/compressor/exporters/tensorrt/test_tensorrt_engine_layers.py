"""The report of layers is read in the wording of both builders, and anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import ArtifactError
from compressor.exporters.tensorrt.engine_layers import (
    EngineLayer,
    EngineTensor,
    QuantizedLayer,
    check_placed,
    place,
    read_layers,
)

# As TensorRT-RTX 1.7 words it, shortened.
RTX = """Layers:
Name: __mye355_0_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], \
TacticName: , StreamId: 0, Metadata: 
Name: __myl_MulMinMaxRounCast_myl0_1, LayerType: kgen, Inputs: [ { Name: x, Dimensions: [-1,64], \
Strides: [64,1], StrideOrder: [1,0], Datatype: Float, Format: (Linear) Row major linear format }], \
Constants: [ { Name: c, Dimensions: [1], Strides: [1], StrideOrder: [0], Datatype: Float, Format: \
(Linear) Row major linear format }], Outputs: [ { Name: q, Dimensions: [-1,64], Strides: [64,1], \
StrideOrder: [1,0], Datatype: Int8, Format: (Linear) Row major linear format }], TacticName: \
__myl_MulMinMaxRounCast_0x8d8, StreamId: 0, Metadata: [ONNX Layer: codes]
Name: fc_myl0_2, LayerType: gemm, Inputs: [ { Name: q, Dimensions: [-1,64], Strides: [64,1], \
StrideOrder: [1,0], Datatype: Int8, Format: (Linear) Row major linear format }], Constants: [ { \
Name: w, Dimensions: [64,512], Strides: [512,1], StrideOrder: [1,0], Datatype: Int8, Format: \
(Linear) Row major linear format }, { Name: a, Dimensions: [1], Strides: [1], StrideOrder: [0], \
Datatype: Float, Format: (Linear) Row major linear format }], Outputs: [ { Name: y, Dimensions: \
[-1,512], Strides: [512,1], StrideOrder: [1,0], Datatype: Float, Format: (Linear) Row major linear \
format }], TacticName: __myelin_CASK_STUB, StreamId: 0, Metadata: [ONNX Layer: fc][ONNX Layer: \
layer1/conv[0]]

I/O Tensors:
 Name: x, IOMode: Input, DataType: Float, Dimensions: [-1,64], LayerType: none
"""  # noqa: W291

# In the wording of the developer guide of TensorRT 10.
GPU = """Layers:
Name: conv1.weight + QuantizeLinear_7 + Conv_9 + Relu_10, LayerType: CaskConvolution, Inputs: [ { \
Name: 55, Location: Device, Dimensions: [1,64,56,56], Format/Datatype: Thirty-two wide channel \
vectorized row major Int8 format }], Outputs: [ { Name: 66, Location: Device, Dimensions: \
[1,64,56,56], Format/Datatype: Thirty-two wide channel vectorized row major Int8 format }], \
ParameterType: Convolution, Kernel: [3,3], Weights: {"Type": "Int8", "Count": 36864}, HasBias: 1, \
TacticName: sm80_xmma, StreamId: 0, Metadata: 
Name: Reformatting CopyNode for Input Tensor 0 to Conv_9, LayerType: Reformat, Inputs: [ { Name: \
x, Location: Device, Dimensions: [1,3,224,224], Format/Datatype: Row major linear FP32 }], \
Outputs: [ { Name: r, Location: Device, Dimensions: [1,3,224,224], Format/Datatype: Half }], \
ParameterType: Reformat, TacticName: 0x0, StreamId: 0, Metadata: [ONNX Layer: Conv_9]

Bindings:
x
"""  # noqa: W291


def test_the_wording_of_rtx() -> None:
    nodes = ["codes", "fc", "layer1/conv[0]", "conv"]
    shape, scaled, product = read_layers(RTX, nodes)
    assert (shape.type, shape.inputs, shape.nodes, shape.precision) == ("shape_call", (), (), "")
    assert scaled.inputs == (EngineTensor("x", (-1, 64), "float32"),)
    assert scaled.outputs[0].dtype == "int8"
    assert not scaled.multiplies
    assert (product.type, product.precision, product.multiplies) == ("gemm", "int8", True)
    assert product.nodes == ("fc", "layer1/conv[0]")
    assert [c.dtype for c in product.constants] == ["int8", "float32"]
    assert product.constants[0].shape == (64, 512)


def test_the_wording_of_gpu() -> None:
    convolution, copy = read_layers(GPU, ["Conv_9", "Relu_10", "Conv_1"])
    assert convolution.nodes == ("Conv_9", "Relu_10")
    assert convolution.constants == (EngineTensor("weights", (36864,), "int8"),)
    assert convolution.precision == "int8"
    assert (copy.inputs[0].dtype, copy.outputs[0].dtype) == ("float32", "float16")
    placed = place([QuantizedLayer("conv1", "Conv_9", "int8", "int8")], (convolution, copy))
    assert placed[0].ok
    assert not place([QuantizedLayer("conv1", "Conv_9", "int8", "int8")], (copy,))[0].ok


@pytest.mark.parametrize("text", ["", "Layers:\n", "Engine Layer Information:\nLayer(x): y"])
def test_another_wording_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="in an unknown form"):
        read_layers(text, [])


def test_words_in_the_name_of_a_fused_layer() -> None:
    """A cast before the product means that the product is of floats, whatever is read."""
    text = RTX.replace("Name: fc_myl0_2", "Name: __myl_CastMulCastFc_myl0_2")
    assert read_layers(text, [])[2].precision == "float32"
    text = RTX.replace("Name: fc_myl0_2", "Name: __myl_FcMulCast_myl0_2")
    assert read_layers(text, [])[2].precision == "int8"


def test_layers_that_are_missing_or_of_another_type_are_named() -> None:
    layers = [QuantizedLayer(f"layer{i}", f"n{i}", "int8", "int8") for i in range(3)]
    row = EngineLayer("e", "gemm", ("n0",), (), (), (), "int8")
    other = EngineLayer("f", "gemm", ("n1",), (), (), (), "float16")
    placed = place(layers, [row, other])
    assert [entry.computed for entry in placed] == ["int8", "float16", ""]
    message = "computes layers 'layer1', 'layer2' in another type or float16, not in int8"
    with pytest.raises(ArtifactError, match=message):
        check_placed(placed, "rtx")
    check_placed(placed[:1], "rtx")


NAMES = st.text(
    st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=12
).filter(lambda text: "LayerType" not in text)


@given(NAMES, st.lists(st.integers(-1, 99), max_size=4))
def test_names_and_shapes_come_back(name: str, shape: list[int]) -> None:
    text = (
        f"Layers:\nName: {name}, LayerType: gemm, Inputs: [ {{ Name: a, Dimensions: "
        f"[{','.join(map(str, shape))}], Datatype: Half, Format: x }}], Outputs: [], "
        f"Metadata: [ONNX Layer: {name}]\n"
    )
    (layer,) = read_layers(text, [name])
    assert (layer.name, layer.nodes) == (name, (name,))
    assert layer.inputs == (EngineTensor("a", tuple(shape), "float16"),)
