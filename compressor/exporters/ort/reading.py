"""Read a file of ONNX Runtime's format as an ONNX model, without ONNX Runtime.

The numbers of fields are those of ``onnxruntime/core/flatbuffers/schema/ort.fbs`` in ONNX
Runtime's repository; that schema has the messages of ONNX under the same names.
"""

from __future__ import annotations

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from compressor.exporters.flatbuffer import Flatbuffer, Table

MARK = b"ORTM"
_DEEPEST = 32  # graphs in one another
_TENSOR, _PARAMETER = 1, 2  # kinds of a value's type, and of a length


def ort_model(data: memoryview) -> tuple[ModelProto, str]:
    """Return the model in a file, and the version of ONNX Runtime's format.

    Raises:
        ValueError: it is cut, damaged or of another format.
    """
    root = Flatbuffer(data).root(MARK)
    held = needed(root, 1, "model")
    model = ModelProto(ir_version=held.number(0, "q"))
    for entry in held.tables(1):
        model.opset_import.add(domain=entry.text(0), version=entry.number(1, "q"))
    model.producer_name, model.producer_version = held.text(2), held.text(3)
    for entry in held.tables(9):
        model.metadata_props.add(key=entry.text(0), value=entry.text(1))
    model.graph.CopyFrom(_graph(needed(held, 7, "graph"), 0))
    return model, root.text(0)


def needed(table: Table, number: int, what: str) -> Table:
    """Return the table that a field leads to.

    Raises:
        ValueError: there is none; ``what`` names it.
    """
    found = table.table(number)
    if found is None:
        raise ValueError(f"it has no {what}")
    return found


def _graph(table: Table, depth: int) -> GraphProto:
    if depth > _DEEPEST:
        raise ValueError(f"more than {_DEEPEST} graphs lie in one another")
    graph = GraphProto(name="main")
    graph.initializer.extend(_tensor(item) for item in table.tables(0))
    values = {value.name: value for value in map(_value, table.tables(1))}
    places = [(node.number(4, "I"), node) for node in table.tables(2)]
    graph.node.extend(_node(node, depth) for _, node in sorted(places, key=lambda pair: pair[0]))
    for field, held in ((5, graph.input), (6, graph.output)):
        names = table.texts(field)
        held.extend(values.get(name, ValueInfoProto(name=name)) for name in names)
        for name in names:
            values.pop(name, None)
    graph.value_info.extend(value for value in values.values() if value.HasField("type"))
    return graph


def _tensor(table: Table) -> TensorProto:
    tensor = TensorProto(name=table.text(0), data_type=table.number(3, "i"))
    tensor.dims.extend(table.array(2, "i8").tolist())
    if tensor.data_type == TensorProto.STRING:
        tensor.string_data.extend(text.encode() for text in table.texts(5))
    else:
        tensor.raw_data = table.array(4, "u1").tobytes()
    return tensor


def _value(table: Table) -> ValueInfoProto:
    value = ValueInfoProto(name=table.text(0))
    kind = table.table(2)
    held = kind.table(2) if kind is not None and kind.number(1, "B") == _TENSOR else None
    if held is None:
        return value
    value.type.tensor_type.elem_type = held.number(0, "i")
    shape = held.table(1)
    if shape is None:
        return value
    value.type.tensor_type.shape.SetInParent()
    for entry in shape.tables(0):
        length, made = entry.table(0), value.type.tensor_type.shape.dim.add()
        if length is None:
            continue
        if length.number(0, "b") == _PARAMETER:
            made.dim_param = length.text(2)
        elif length.number(0, "b"):
            made.dim_value = length.number(1, "q")
    return value


def _node(table: Table, depth: int) -> NodeProto:
    node = NodeProto(name=table.text(0), domain=table.text(2), op_type=table.text(5))
    node.input.extend(table.texts(8))
    node.output.extend(table.texts(9))
    node.attribute.extend(_attribute(item, depth) for item in table.tables(10))
    return node


def _attribute(table: Table, depth: int) -> AttributeProto:
    kind = table.number(2, "i")
    made = AttributeProto(name=table.text(0))
    try:
        made.type = kind  # type: ignore[assignment]  # any number comes from a file
    except ValueError as error:
        raise ValueError(f"attribute {made.name!r} is of the unknown type {kind}") from error
    if kind == AttributeProto.FLOAT:
        made.f = table.number(3, "f", 0.0)
    elif kind == AttributeProto.INT:
        made.i = table.number(4, "q")
    elif kind == AttributeProto.STRING:
        made.s = table.text(5).encode()
    elif kind == AttributeProto.TENSOR:
        made.t.CopyFrom(_tensor(needed(table, 6, "tensor")))
    elif kind == AttributeProto.GRAPH:
        made.g.CopyFrom(_graph(needed(table, 7, "graph"), depth + 1))
    elif kind == AttributeProto.FLOATS:
        made.floats.extend(table.array(8, "f4").tolist())
    elif kind == AttributeProto.INTS:
        made.ints.extend(table.array(9, "i8").tolist())
    elif kind == AttributeProto.STRINGS:
        made.strings.extend(text.encode() for text in table.texts(10))
    elif kind == AttributeProto.TENSORS:
        made.tensors.extend(_tensor(item) for item in table.tables(11))
    elif kind == AttributeProto.GRAPHS:
        made.graphs.extend(_graph(item, depth + 1) for item in table.tables(12))
    return made
