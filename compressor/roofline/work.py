"""What each layer and operator of a graph has to do, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from compressor.graph.costs import Traffic, node_macs, node_traffic
from compressor.graph.layers import layer_of
from compressor.roofline.amdahl import is_memory_bound, roof_seconds
from compressor.roofline.kernels import Kernel
from compressor.roofline.peaks import Peaks


@dataclass(frozen=True)
class Work:
    """A layer, or all other operators of one kind.

    Attributes:
        name: the layer; of operators, the kernel's name.
        op: the operator in the graph.
        layer: it multiplies with a constant weight.
        flops: two for each multiply-accumulate of a product; other arithmetic is not counted.
        traffic: what passes between it and the memory.
        type: what its products are computed with.
        count: how many there are.
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
        """Say what bounds it: ``memory``, ``compute``, or nothing where it moves nothing."""
        if not self.traffic.bytes:
            return ""
        moved = self.traffic.bytes
        slow = is_memory_bound(self.flops, moved, peaks.flops[self.type], peaks.bandwidth)
        return "memory" if slow else "compute"

    def reach(self, peaks: Peaks) -> float | None:
        """Return how much of the roof was reached, in percent."""
        return 100 * self.roof(peaks) / self.seconds if self.seconds else None


def work_of_nodes(nodes: Iterable[ir.Node]) -> tuple[list[tuple[ir.Node, Work]], list[str]]:
    """Return what each node does, and the names of those of which shapes are not known."""
    found: list[tuple[ir.Node, Work]] = []
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
        found.append((node, work))
    return found, unknown


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
        own = [node for node in nodes if node in layers]
        placed.update(nodes)
        if own:
            for node, share in zip(own, _shares([layers[n] for n in own]), strict=True):
                layers[node] = _with(layers[node], kernel, share)
            _absorb(layers, own[-1], [by_node[n] for n in nodes if n in by_node and n not in own])
            continue
        rest = [by_node[node] for node in nodes if node in by_node]
        others[kernel.op] = _joined(others.get(kernel.op), kernel, rest)
    left = [work for node, work in works if node not in placed and node not in layers]
    return [*layers.values(), *others.values(), *_unplaced(left)]


def _shares(works: Sequence[Work]) -> list[float]:
    whole = sum(work.flops for work in works)
    return [w.flops / whole if whole else 1 / len(works) for w in works]


def _with(work: Work, kernel: Kernel, share: float) -> Work:
    return replace(
        work,
        kernels=(*work.kernels, kernel.op),
        seconds=(work.seconds or 0.0) + share * kernel.seconds,
    )


def _absorb(layers: dict[ir.Node, Work], node: ir.Node, fused: Sequence[Work]) -> None:
    """Add the operations of products without weights, as in attention, to the layer's kernel."""
    layers[node] = replace(layers[node], flops=layers[node].flops + sum(w.flops for w in fused))


def _joined(known: Work | None, kernel: Kernel, works: Sequence[Work]) -> Work:
    parts = [*works, *([] if known is None else [known])]
    op = known.op if known is not None else works[-1].op if works else kernel.op
    type_ = next((w.type for w in parts if w.flops), "float32")
    return Work(
        name=kernel.op,
        op=op,
        layer=False,
        flops=sum(w.flops for w in parts),
        traffic=total_traffic(w.traffic for w in parts),
        type=type_,
        count=1 if known is None else known.count + 1,
        kernels=(kernel.op,),
        seconds=kernel.seconds + ((known.seconds or 0.0) if known is not None else 0.0),
    )


def _unplaced(works: Sequence[Work]) -> list[Work]:
    """Keep what moves or computes something, though no kernel was recognised for it."""
    return [work for work in works if work.flops]


def total_traffic(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum."""
    known = list(parts)
    return Traffic(
        weights=sum(t.weights for t in known),
        weight_bytes=sum(t.weight_bytes for t in known),
        activations=sum(t.activations for t in known),
        activation_bytes=sum(t.activation_bytes for t in known),
    )
