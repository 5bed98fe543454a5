"""A small stand-in for NVIDIA's package ``tensorrt``: the part of its interface that is used here.

An engine is the ONNX file and what it was built with, as JSON; ONNX Runtime executes it on tensors
in main memory. Names and signatures are those of TensorRT 10 and 11; what the real package does
with them, this cannot show.
"""

from __future__ import annotations

import base64
import ctypes
import json
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import onnx

__version__ = "10.99"


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class BuilderFlag(Enum):
    SPARSE_WEIGHTS = 0
    STRIP_PLAN = 1
    VERSION_COMPATIBLE = 2


class HardwareCompatibilityLevel(Enum):
    NONE = 0
    AMPERE_PLUS = 1


class ProfilingVerbosity(Enum):
    DETAILED = 0


class LayerInformationFormat(Enum):
    ONELINE = 0


class TensorIOMode(Enum):
    INPUT = 0
    OUTPUT = 1


class DataType(Enum):
    FLOAT = 0


class ILogger:
    class Severity(Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        VERBOSE = 4

    def __init__(self) -> None:
        self.given = True


class ParserError:
    def __init__(self, node: onnx.NodeProto):
        self._node = node

    def node_name(self) -> str:
        return self._node.name

    def node_operator(self) -> str:
        return self._node.op_type

    def desc(self) -> str:
        return "false"


class Network:
    def __init__(self, flags: int):
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        self.model = onnx.ModelProto()


class OnnxParser:
    def __init__(self, network: Network, logger: ILogger):
        assert isinstance(logger, ILogger)
        self._network = network
        self._errors: list[ParserError] = []

    def parse_from_file(self, path: str) -> bool:
        self._network.model = onnx.load(path)
        nodes = self._network.model.graph.node
        self._errors = [ParserError(n) for n in nodes if not self.supports_operator(n.op_type)]
        return not self._errors

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def supports_operator(self, name: str) -> bool:
        return name != "Det"


class TimingCache:
    def __init__(self, content: bytes):
        self.content = content

    def serialize(self) -> bytes:
        return self.content


class Config:
    def __init__(self) -> None:
        self.flags: list[str] = []
        self.profiles: list[dict[str, Any]] = []
        self.profiling_verbosity: Any = None
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self.cache: TimingCache | None = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.append(flag.name)

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1

    def create_timing_cache(self, content: bytes) -> TimingCache:
        return TimingCache(content)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return b"other version" not in cache.content

    def get_timing_cache(self) -> TimingCache:
        assert self.cache is not None
        return TimingCache(self.cache.content + b"measured;")


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        assert len(shapes) == 3
        self.shapes[name] = shapes


class Builder:
    def __init__(self, logger: ILogger):
        assert logger.given

    def create_network(self, flags: int) -> Network:
        return Network(flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes:
        assert config.profiling_verbosity == ProfilingVerbosity.DETAILED
        content = {
            "onnx": base64.b64encode(network.model.SerializeToString()).decode(),
            "flags": config.flags,
            "hardware": config.hardware_compatibility_level.name,
            "profiles": config.profiles,
        }
        return json.dumps(content).encode()


class Runtime:
    def __init__(self, logger: ILogger):
        assert logger.given

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        return Engine(json.loads(plan)) if plan.startswith(b"{") else None


class Inspector:
    def __init__(self, model: onnx.ModelProto):
        self._model = model

    def get_engine_information(self, form: LayerInformationFormat) -> str:
        assert form is LayerInformationFormat.ONELINE
        quantized = {o for n in self._model.graph.node for o in n.output if "Dequ" in n.op_type}
        lines = ["Layers:"]
        for node in self._model.graph.node:
            if node.op_type in ("Conv", "Gemm", "MatMul"):
                kind = "Int8" if node.input[0] in quantized else "Float"
                tensor = (
                    f"{{ Name: t, Location: Device, Dimensions: [1,2], Format/Datatype: {kind} }}"
                )
                lines.append(
                    f"Name: w + {node.name}, LayerType: CaskConvolution, Inputs: [ {tensor}], "
                    f"Outputs: [ {tensor}], TacticName: t, StreamId: 0, Metadata: "
                )
        return "\n".join([*lines, "", "Bindings:", "x", ""])


class Engine:
    def __init__(self, content: dict[str, Any]):
        self.content = content
        self.model = onnx.load_from_string(base64.b64decode(content["onnx"]))
        graph = self.model.graph
        self._names = [v.name for v in (*graph.input, *graph.output)]

    def create_engine_inspector(self) -> Inspector:
        return Inspector(self.model)

    def create_execution_context(self) -> Context:
        return Context(self)

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        inputs = [v.name for v in self.model.graph.input]
        return TensorIOMode.INPUT if name in inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:  # noqa: ARG002
        return DataType.FLOAT

    def get_tensor_shape(self, name: str) -> list[int]:
        value = next(v for v in self.model.graph.input if v.name == name)
        return [d.dim_value or -1 for d in value.type.tensor_type.shape.dim]

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return self.content["profiles"][index][name]


class Context:
    def __init__(self, engine: Engine):
        import onnxruntime as ort

        self._engine = engine
        self._session = ort.InferenceSession(
            engine.model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, 0)
        self._shapes[name] = shape
        return all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._results()[name].shape

    def set_tensor_address(self, name: str, place: int) -> None:
        self._places[name] = place

    def execute_async_v3(self, stream: int) -> bool:  # noqa: ARG002
        for name, array in self._results().items():
            ctypes.memmove(self._places[name], array.tobytes(), array.nbytes)
        return True

    def _results(self) -> dict[str, Any]:
        feeds = {}
        for name, shape in self._shapes.items():
            array = np.zeros(shape, np.float32)
            if name in self._places:
                ctypes.memmove(array.ctypes.data, self._places[name], array.nbytes)
            feeds[name] = array
        names = [o.name for o in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, feeds), strict=True))
