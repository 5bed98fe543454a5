"""What exports for the runtimes of phones have in common."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import ClassVar

import onnx_ir as ir

from compressor.errors import SpecError
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes, computes_scale, constant_of
from compressor.types.carrier import Carrier
from compressor.types.exporter import ExportContext, Exporter

_STEPS = 256  # of a result, for a step of its factors
_PHONES = ("aarch64", "arm64", "armv7l", "armv8l")


class DeviceExporter(Exporter):
    """A format whose runtime computes with int8 weights and activations of one byte.

    Class attributes:
        runtime: its name, for messages.
        package: the package that writes the format, or runs it.
        module: its name in Python.
    """

    runtime: ClassVar[str]
    package: ClassVar[str]
    module: ClassVar[str]
    # All share LiteRT's rules: operators between codes read and write int8.
    targets: ClassVar[frozenset[str]] = frozenset({"litert"})
    exact: ClassVar[bool] = True
    estimated: ClassVar[bool] = True  # what a compiler takes, or equal scales save, is known later

    @property
    def tools(self) -> Mapping[str, str]:
        """The version of the package."""
        self.need_package(self.package, self.module)
        return {self.package: version(self.package)}

    @property
    def run_by(self) -> Mapping[str, str]:
        """The version of the package."""
        return self.tools

    @property
    def not_judged(self) -> str:
        """Why latency is not judged: the kernels for this machine's processor are others."""
        if platform.machine() in _PHONES:
            return ""
        timed = "" if self.cannot_run else ", timed on this machine's processor"
        return f"meant for phones{timed}"

    def taken_graph(self, carrier: Carrier) -> ir.Model:
        """Return a model's graph, whose codes the runtime takes.

        Raises:
            SpecError: the package is not installed, there is no graph, or a node's codes are of a
                type that the runtime has not.
        """
        self.need_package(self.package, self.module)
        model = self.needed_graph(carrier)
        _check_codes(model, self.runtime)
        return model


def kernel_multiplies(read: float, weight: float, written: float) -> bool:
    """Whether XNNPACK multiplies codes with these steps, of the input, the weight and the result.

    It refuses to load a layer in which a step of both factors is 256 of the result's or more, as
    of a channel that is always zero by its bias and has large weights.
    """
    return read * weight < _STEPS * written


def note_of(context: ExportContext) -> str:
    """Return the note in a file that tells where it comes from."""
    return f"compressor {version('compressor')}, {context.name}, spec {context.spec_digest}"


def _check_codes(model: ir.Model, runtime: str) -> None:
    """Refuse codes that a runtime for phones has no type or no kernel for.

    Args:
        model: the graph.
        runtime: its name, for the message.

    Raises:
        SpecError: naming the node, and what to change.
    """
    for node in all_nodes(model.graph):
        row = operator(node)
        if computes_scale(node) or row.integer:
            raise SpecError(
                f"node {node.name!r} ({node.op_type})", f"{runtime} does not take it",
                "use quantize-static, which fixes scales before",
            )  # fmt: skip
        if row.family != "quantization":
            continue
        codes = node.outputs[0] if row.quantizes else node.inputs[0]
        stored = codes is not None and constant_of(codes) is not None
        kind = "weights" if stored else "activations"
        dtype = None if codes is None else codes.dtype
        subject = f"node {node.name!r} ({node.op_type})"
        if node.attributes.get_int("block_size", 0):
            readers = [reader for reader, _ in node.outputs[0].uses()]
            layer = next((reader for reader in readers if operator(reader).recurrent), None)
            raise SpecError(
                subject, f"has scales for groups of a row, which {runtime} has not",
                "set granularity: channel" if layer is None
                else f"leave its {layer.op_type} in floats (skip: true)",
            )  # fmt: skip
        other = ir.DataType.INT32 if stored else ir.DataType.UINT8
        allowed = (ir.DataType.INT8, other)
        if dtype is not None and dtype not in allowed:
            raise SpecError(
                subject, f"its {kind} are {dtype.name.lower()}, and {runtime}'s are int8",
                "set bits: 8, and leave symmetric out",
            )  # fmt: skip
