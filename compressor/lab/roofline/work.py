"""The work of each operator, what bounds it, and what each kind of compression could save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from compressor.graph.costs import Traffic, node_macs, node_traffic
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator, operator_named
from compressor.graph.values import constant_of, dims
from compressor.lab.roofline.measuring import Kernel, Peaks


def roof_seconds(flops: float, moved: float, peak: float, bandwidth: float) -> float:
    """Return the least time that the machine allows.

    Args:
        peak: operations a second.
    """
    return max(flops / peak, moved / bandwidth)


def is_memory_bound(flops: float, moved: float, peak: float, bandwidth: float) -> bool:
    """Return whether moving the bytes takes longer than computing."""
    return moved / bandwidth > flops / peak


def overall_speedup(whole: float, parts: Sequence[float], speedups: Sequence[float]) -> float:
    """Return how much faster the whole becomes.

    Args:
        whole: seconds, at least the sum of the parts.
        parts: seconds of what becomes faster.
        speedups: how much faster each becomes; 1 where it does not.
    """
    saved = sum(t - t / s for t, s in zip(parts, speedups, strict=True))
    return whole / (whole - saved)


def limit(whole: float, parts: Sequence[float]) -> float | None:
    """Return the speed-up if the parts took no time; ``None`` where nothing else takes any."""
    rest = whole - sum(parts)
    return whole / rest if rest > 0 else None


@dataclass(frozen=True)
class Work:
    """A layer, or all other operators of one kind.

    Attributes:
        name: the layer; of operators, the kernel's name.
        layer: it multiplies with a constant weight.
        flops: two for each multiply-accumulate of a product; other arithmetic is not counted.
        traffic: what passes between it and the memory.
        type: what its products are computed with.
        kernels: what is executed; empty where nothing was recognised.
        seconds: of one run; ``None`` where no kernel was recognised.
    """

    name: str
    op: str
    layer: bool
    flops: float
    traffic: Traffic
    type: str = "float32"
    count: int = 1
    kernels: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def intensity(self) -> float | None:
        """Operations for each byte; ``None`` where nothing is moved."""
        return self.flops / self.traffic.bytes if self.traffic.bytes else None

    def roof(self, peaks: Peaks) -> float:
        """Return the least seconds that the machine allows."""
        moved = self.traffic.bytes
        return roof_seconds(self.flops, moved, peaks.flops[self.type], peaks.bandwidth)

    def bound(self, peaks: Peaks) -> str:
        """Return what bounds it: ``memory``, ``compute``, or nothing where it moves nothing."""
        if not self.traffic.bytes:
            return ""
        moved = self.traffic.bytes
        slow = is_memory_bound(self.flops, moved, peaks.flops[self.type], peaks.bandwidth)
        return "memory" if slow else "compute"

    def reach(self, peaks: Peaks) -> float | None:
        """Return how much of the roof was reached, in percent."""
        return 100 * self.roof(peaks) / self.seconds if self.seconds else None


def work_of_nodes(nodes: Iterable[ir.Node]) -> tuple[list[tuple[ir.Node, Work]], list[str]]:
    """Return what each node does, and the names of those whose shapes are not known."""
    works: list[tuple[ir.Node, Work]] = []
    unknown: list[str] = []
    for node in nodes:
        traffic = node_traffic(node)
        layer = layer_of(node)
        if traffic is None:
            unknown.append(node.name or node.op_type)
            traffic = Traffic()
        flops = 2.0 * node_macs(node)
        name = layer.name if layer is not None else node.name or node.op_type
        work = Work(name, node.op_type, layer is not None, flops, traffic, _type(node, traffic))
        works.append((node, work))
    return works, unknown


def _type(node: ir.Node, traffic: Traffic) -> str:
    if node.op_type.endswith("Integer") or (traffic.integer and node_macs(node)):
        return "int8"
    dtype = node.outputs[0].dtype if node.outputs else None
    return "float16" if dtype == ir.DataType.FLOAT16 else "float32"


def timed(
    works: Sequence[tuple[ir.Node, Work]],
    kernels: Sequence[Kernel],
    members: Mapping[str, Sequence[ir.Node]],
) -> list[Work]:
    """Join work and times: one entry for each layer, one for each other kind of operator.

    A kernel of several layers gives each its share of the operations.
    """
    by_node = dict(works)
    layers: dict[ir.Node, Work] = {node: work for node, work in works if work.layer}
    others: dict[str, Work] = {}
    placed: set[ir.Node] = set()
    for kernel in kernels:
        nodes = members.get(kernel.name, ())
        computed = [node for node in nodes if node in layers]
        placed.update(nodes)
        if computed:
            shares = _shares([layers[node] for node in computed])
            for node, share in zip(computed, shares, strict=True):
                layers[node] = _with(layers[node], kernel, share)
            # Products without weights, as in attention, count for the layer's kernel.
            fused = [by_node[n].flops for n in nodes if n in by_node and n not in computed]
            last = computed[-1]
            layers[last] = replace(
                layers[last],
                flops=layers[last].flops + sum(fused),
                traffic=_with_residuals(layers[last].traffic, nodes),
            )
            continue
        done = [by_node[node] for node in nodes if node in by_node]
        others[kernel.op] = _joined(others.get(kernel.op), kernel, done)
    # What moves or computes something is kept, though no kernel was recognised for it.
    rest = [w for node, w in works if node not in placed and node not in layers and w.flops]
    return [*layers.values(), *others.values(), *rest]


def _with_residuals(traffic: Traffic, nodes: Sequence[ir.Node]) -> Traffic:
    """Add what a kernel reads to add it to its product: a sum writes no more than that does."""
    made = {value for node in nodes for value in node.outputs}
    for node in nodes:
        for value in node.inputs if operator(node).arithmetic == "+" else ():
            lengths = None if value is None or value in made else dims(value)
            if value is None or lengths is None or constant_of(value) is not None:
                continue
            size, width = prod(lengths), 4.0 if value.dtype is None else value.dtype.itemsize
            traffic = replace(
                traffic,
                activations=traffic.activations + size,
                activation_bytes=traffic.activation_bytes + size * width,
            )
    return traffic


def _shares(works: Sequence[Work]) -> list[float]:
    whole = sum(work.flops for work in works)
    return [w.flops / whole if whole else 1 / len(works) for w in works]


def _of_floats(kernel: Kernel) -> bool:
    """Whether a kernel multiplies floats, as between codes of 4 bits, of which no other does."""
    row = operator_named(kernel.op.removeprefix("Nhwc").removeprefix("Fused"))
    return row.family == "product" and not row.integer


def _with(work: Work, kernel: Kernel, share: float) -> Work:
    floats = work.type == "int8" and _of_floats(kernel)
    return replace(
        work,
        type="float32" if floats else work.type,
        kernels=(*work.kernels, kernel.op),
        seconds=(work.seconds or 0.0) + share * kernel.seconds,
    )


def _joined(before: Work | None, kernel: Kernel, works: Sequence[Work]) -> Work:
    parts = [*works, *([] if before is None else [before])]
    op = before.op if before is not None else works[-1].op if works else kernel.op
    type_ = next((w.type for w in parts if w.flops), "float32")
    return Work(
        name=kernel.op,
        op=op,
        layer=False,
        flops=sum(w.flops for w in parts),
        traffic=total_traffic(w.traffic for w in parts),
        type=type_,
        count=1 if before is None else before.count + 1,
        kernels=(kernel.op,),
        seconds=kernel.seconds + ((before.seconds or 0.0) if before is not None else 0.0),
    )


def total_traffic(parts: Iterable[Traffic]) -> Traffic:
    """Return the total traffic of several operators."""
    every = list(parts)
    return Traffic(
        weights=sum(t.weights for t in every),
        weight_bytes=sum(t.weight_bytes for t in every),
        activations=sum(t.activations for t in every),
        activation_bytes=sum(t.activation_bytes for t in every),
    )


@dataclass(frozen=True)
class Kind:
    """A kind of compression.

    Attributes:
        assumption: what has to be so for the speed-up.
        operations: share of the operations of layers that is left.
        weights: share of the weights that is left.
        channels: share of the activations' elements that is left.
        weight_bits: of a weight; ``None`` as it is.
        activation_bits: of an activation; ``None`` as it is.
        type: whose peak layers compute with; ``None`` as they do.
    """

    name: str
    assumption: str
    operations: float = 1.0
    weights: float = 1.0
    channels: float = 1.0
    weight_bits: float | None = None
    activation_bits: float | None = None
    type: str | None = None


KINDS = (
    Kind(
        "int8 weights and activations",
        "all layers and everything between them compute with int8, except softmax, normalization "
        "and whatever has no integer kernel",
        weight_bits=8,
        activation_bits=8,
        type="int8",
    ),
    Kind(
        "int8 weights only",
        "weights take one byte and are widened when read; products stay as they are",
        weight_bits=8,
    ),
    Kind(
        "int4 weights only",
        "weights take half a byte, with scales of 16 bits for groups of 32; products stay as "
        "they are",
        weight_bits=4.5,
    ),
    Kind(
        "2:4 sparsity",
        "half of the products are skipped, and weights take half their bytes plus two bits for "
        "each position: a few GPUs have kernels for it, ONNX Runtime on CPUs has none",
        operations=0.5,
        weights=0.5 + 0.5 * 2 / 32,
    ),
    Kind(
        "half of the channels",
        "every layer loses half of its inputs and half of its outputs, the first and the last "
        "too: a quarter of the products and weights, half of the activations",
        operations=0.25,
        weights=0.25,
        channels=0.5,
    ),
    Kind(
        "float16",
        "weights and activations take two bytes; products reach the float16 peak that was measured",
        weight_bits=16,
        activation_bits=16,
        type="float16",
    ),
)


@dataclass(frozen=True)
class Prospect:
    """The best that a kind of compression can do for the whole model.

    Attributes:
        share: percent of the time that it makes shorter.
        limit: of the whole, if that share took no time at all; ``None``: no limit.
    """

    kind: Kind
    share: float
    speedup: float
    limit: float | None


def prospects(works: Sequence[Work], whole: float, peaks: Peaks) -> tuple[Prospect, ...]:
    """Return the most that each kind of compression could gain (roofline, Amdahl's law).

    Each operator is assumed to stay as near to its roof as it is now: a compute-bound one gains at
    most the ratio of the peaks or of the products, a memory-bound one the ratio of the bytes.
    Nothing becomes slower.
    """
    best_cases = []
    for kind in KINDS:
        speedups = [max(1.0, _speedup(work, kind, peaks)) for work in works]
        faster = [w.seconds or 0.0 for w, s in zip(works, speedups, strict=True) if s > 1]
        parts = [work.seconds or 0.0 for work in works]
        best = overall_speedup(whole, parts, speedups)
        share = 100 * sum(faster) / whole
        best_cases.append(Prospect(kind, share, best, limit(whole, faster)))
    return tuple(best_cases)


def _speedup(work: Work, kind: Kind, peaks: Peaks) -> float:
    before = work.roof(peaks)
    weight_bits = kind.weight_bits if work.layer else None
    weights = _narrowed(work.traffic.weight_bytes, work.traffic.weights, weight_bits)
    whole = kind.activation_bits is None or kind.activation_bits > 8
    follows = whole or operator_named(work.op).int8_form
    bits = kind.activation_bits if follows else None
    activations = _narrowed(work.traffic.activation_bytes, work.traffic.activations, bits)
    type_ = work.type if kind.type is None or work.type == "int8" else kind.type
    after = roof_seconds(
        work.flops * kind.operations,
        weights * (kind.weights if work.layer else 1.0) + activations * kind.channels,
        peaks.flops[type_],
        peaks.bandwidth,
    )
    return before / after if before > 0 and after > 0 else 1.0


def _narrowed(stored: float, elements: int, bits: float | None) -> float:
    return stored if bits is None else min(stored, elements * bits / 8)
