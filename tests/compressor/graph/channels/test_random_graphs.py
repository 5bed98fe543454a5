"""Random graphs: a smaller one computes what the whole one does with channels of zero.

One whose channels have changed places computes the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compressor.graph.channels import channel_graphs
from tests.compressor.graph.channels.channel_graphs import Weight, positive

SIDE = 6
Draw = Callable[[st.SearchStrategy[int]], int]


class Draft:
    """A graph that is being drawn: images ``[N, channels, SIDE, SIDE]`` and what computes them."""

    def __init__(self, draw: Draw):
        self.draw = draw
        self.lines: list[str] = []
        self.weights: dict[str, Weight] = {}
        self.images: list[tuple[str, int]] = [("x", 3)]

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def weight(self, value: Weight) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name

    def put(self, expression: str, count: int = 1) -> list[str]:
        names = [f"v{len(self.lines)}_{i}" for i in range(count)]
        self.lines.append(f"{', '.join(names)} = {expression}")
        return names

    def one(self, expression: str) -> str:
        return self.put(expression)[0]

    def image(self) -> tuple[str, int]:
        return self.images[self.number(max(0, len(self.images) - 3), len(self.images) - 1)]

    def keep(self, name: str, channels: int) -> None:
        self.images.append((name, channels))

    def conv(self, source: str, read: int, written: int, size: int = 1, groups: int = 1) -> str:
        weight = self.weight((written, read // groups, size, size))
        bias = f", {self.weight((written,))}" if self.number(0, 1) else ""
        pads = ",".join([str(size // 2)] * 4)
        return self.one(f"Conv<group={groups}, pads=[{pads}]>({source}, {weight}{bias})")


def convolution(draft: Draft) -> None:
    source, read = draft.image()
    written = 2 * draft.number(1, 5)
    draft.keep(draft.conv(source, read, written, draft.number(0, 1) * 2 + 1), written)


def grouped(draft: Draft) -> None:
    source, read = draft.image()
    groups = [n for n in (2, 3, 4, read) if read % n == 0][-1 if draft.number(0, 1) else 0]
    written = groups * draft.number(1, 2)
    draft.keep(draft.conv(source, read, written, 3, groups), written)


def transposed(draft: Draft) -> None:
    source, read = draft.image()
    groups = 2 if read % 2 == 0 and draft.number(0, 1) else 1
    weight = draft.weight((read, 4 // groups, 1, 1))
    draft.keep(draft.one(f"ConvTranspose<group={groups}>({source}, {weight})"), 4)


def activation(draft: Draft) -> None:
    source, channels = draft.image()
    names = ("Relu", "Sigmoid", "HardSwish", "Softplus", "Tanh", "Exp", "Gelu", "Cos")
    name = names[draft.number(0, len(names) - 1)]
    bounded = draft.one(f"Tanh({source})")
    draft.keep(draft.one(f"{name}({bounded})"), channels)


def normalized(draft: Draft) -> None:
    source, channels = draft.image()
    scale, shift = draft.weight((channels,)), draft.weight((channels,))
    kind = draft.number(0, 3)
    if kind == 0:
        mean, variance = draft.weight((channels,)), draft.weight(positive(channels))
        own = f"BatchNormalization({source}, {scale}, {shift}, {mean}, {variance})"
    elif kind == 1:
        own = f"InstanceNormalization({source}, {scale}, {shift})"
    elif kind == 2:
        groups = 2 if channels % 2 == 0 else 1
        own = f"GroupNormalization<num_groups={groups}>({source}, {scale}, {shift})"
    else:
        turned = draft.one(f"Transpose<perm=[0,2,3,1]>({source})")
        row = draft.one(f"LayerNormalization({turned}, {scale}, {shift})")
        own = f"Transpose<perm=[0,3,1,2]>({row})"
    draft.keep(draft.one(own), channels)


def residual(draft: Draft) -> None:
    source, channels = draft.image()
    other, read = draft.image()
    branch = draft.conv(other, read, channels)
    name = ("Add", "Mul", "Sub", "Max")[draft.number(0, 3)]
    draft.keep(draft.one(f"{name}({source}, {branch})"), channels)


def concatenated(draft: Draft) -> None:
    (first, left), (second, right) = draft.image(), draft.image()
    draft.keep(draft.one(f"Concat<axis=1>({first}, {second})"), left + right)


def divided(draft: Draft) -> None:
    source, channels = draft.image()
    if channels < 2:
        return
    at = draft.number(1, channels - 1)
    sizes = draft.weight([at, channels - at])
    first, second = draft.put(f"Split<axis=1>({source}, {sizes})", 2)
    draft.keep(draft.one(f"Concat<axis=1>({second}, {first})"), channels)
    draft.keep(first, at)


def gated(draft: Draft) -> None:
    source, channels = draft.image()
    if channels % 2:
        return
    first, second = draft.put(f"Split<axis=1, num_outputs=2>({source})", 2)
    opened = draft.one(f"Sigmoid({first})")
    draft.keep(draft.one(f"Mul({opened}, {second})"), channels // 2)


def picked(draft: Draft) -> None:
    source, channels = draft.image()
    if channels < 3:
        return
    start, step = draft.number(0, 1), draft.number(1, 2)
    bounds = [draft.weight([n]) for n in (start, 2**31, 1, step)]
    left = len(range(start, channels, step))
    if left > 1:
        draft.keep(draft.one(f"Slice({source}, {', '.join(bounds)})"), left)
    places = draft.weight([draft.number(-channels, channels - 1) for _ in range(3)])
    draft.keep(draft.one(f"Gather<axis=1>({source}, {places})"), 3)


def shuffled(draft: Draft) -> None:
    source, channels = draft.image()
    if channels % 2:
        return
    parted = draft.weight([0, 2, channels // 2, SIDE, SIDE])
    own = draft.one(f"Reshape({source}, {parted})")
    own = draft.one(f"Transpose<perm=[0,2,1,3,4]>({own})")
    whole = draft.weight([0, -1, SIDE, SIDE])
    draft.keep(draft.one(f"Reshape({own}, {whole})"), channels)


def padded(draft: Draft) -> None:
    source, channels = draft.image()
    before, after = draft.number(0, 2), draft.number(0, 2)
    pads = draft.weight([0, before, 0, 0, 0, after, 0, 0])
    draft.keep(draft.one(f"Pad({source}, {pads})"), channels + before + after)


def excited(draft: Draft) -> None:
    source, channels = draft.image()
    pooled = draft.one(f"GlobalAveragePool({source})")
    small = draft.one(f"Relu({draft.conv(pooled, channels, 4)})")
    gate = draft.one(f"Sigmoid({draft.conv(small, 4, channels)})")
    draft.keep(draft.one(f"Mul({source}, {gate})"), channels)


def scaled(draft: Draft) -> None:
    source, channels = draft.image()
    own = draft.weight((channels, 1, 1))
    name = ("Mul", "Add", "PRelu", "Max")[draft.number(0, 3)]
    draft.keep(draft.one(f"{name}({source}, {own})"), channels)


def rearranged(draft: Draft) -> None:
    source, channels = draft.image()
    mode = ("DCR", "CRD")[draft.number(0, 1)]
    wide = draft.one(f"SpaceToDepth<blocksize=2>({source})")
    if draft.number(0, 1):
        wide = draft.conv(wide, 4 * channels, 4 * channels)
    draft.keep(draft.one(f'DepthToSpace<blocksize=2, mode="{mode}">({wide})'), channels)


def summed(draft: Draft) -> None:
    source, channels = draft.image()
    name = ("ReduceSum", "ReduceMean", "ReduceL2", "ReduceMax")[draft.number(0, 3)]
    axis = draft.weight([1])
    total = draft.one(f"Tanh({draft.one(f'{name}<keepdims=1>({source}, {axis})')})")
    draft.keep(draft.one(f"Mul({source}, {total})"), channels)


def attended(draft: Draft) -> None:
    source, channels = draft.image()
    heads, width, shared = 4, draft.number(1, 3), draft.number(0, 1)
    lines = draft.weight([0, channels, SIDE * SIDE])
    rows = draft.one(f"Transpose<perm=[0,2,1]>({draft.one(f'Reshape({source}, {lines})')})")

    def projected(count: int, order: str) -> str:
        own = draft.one(f"MatMul({rows}, {draft.weight((channels, count * width))})")
        own = draft.one(f"Add({own}, {draft.weight((count * width,))})")
        own = draft.one(f"Reshape({own}, {draft.weight([0, SIDE * SIDE, count, width])})")
        own = draft.one(f"Transpose<perm=[{order}]>({own})")
        if count == heads:
            return own
        more = draft.one(f"Unsqueeze({own}, {draft.weight([2])})")
        length, last = (SIDE * SIDE, width) if order == "0,2,1,3" else (width, SIDE * SIDE)
        repeated = draft.weight([1, count, heads // count, length, last])
        more = draft.one(f"Expand({more}, {repeated})")
        return draft.one(f"Reshape({more}, {draft.weight([0, heads, length, last])})")

    few = heads // 2 if shared else heads
    query, key, value = (
        projected(heads, "0,2,1,3"),
        projected(few, "0,2,3,1"),
        projected(few, "0,2,1,3"),
    )
    weights = draft.one(f"Softmax({draft.one(f'MatMul({query}, {key})')})")
    own = draft.one(f"Transpose<perm=[0,2,1,3]>({draft.one(f'MatMul({weights}, {value})')})")
    own = draft.one(f"Reshape({own}, {draft.weight([0, SIDE * SIDE, heads * width])})")
    own = draft.one(f"MatMul({own}, {draft.weight((heads * width, channels))})")
    own = draft.one(f"Transpose<perm=[0,2,1]>({draft.one(f'Add({own}, {rows})')})")
    draft.keep(draft.one(f"Reshape({own}, {draft.weight([0, channels, SIDE, SIDE])})"), channels)


STEPS = (
    *(convolution, convolution, convolution, grouped, transposed, activation, normalized, residual),
    *(concatenated, divided, gated, picked, shuffled, padded, excited, scaled, rearranged, summed),
    attended,
)


@st.composite
def graphs(draw: Callable[..., int]) -> ir.Model:
    """Draw a graph of some steps, with a linear head on what the last of them computes."""
    draft = Draft(draw)
    convolution(draft)
    for _ in range(draft.number(2, 7)):
        STEPS[draft.number(0, len(STEPS) - 1)](draft)
    source, channels = draft.images[-1]
    pooled = draft.one(f"GlobalAveragePool({source})")
    flat = draft.one(f"Flatten({pooled})")
    weight, bias = draft.weight((2, channels)), draft.weight((2,))
    draft.lines.append(f"y = Gemm<transB=1>({flat}, {weight}, {bias})")
    body = "\n".join(draft.lines)
    return channel_graphs.graph(
        f"(float[N,3,{SIDE},{SIDE}] x) => (float[N,2] y) {{ {body} }}", draft.weights
    )


@settings(max_examples=40)
@given(graphs(), st.integers(0, 2**16))
def test_a_smaller_graph_computes_what_one_with_channels_of_zero_does(model: ir.Model, seed: int):
    channel_graphs.proved(model, seed)


@settings(max_examples=25)
@given(graphs(), st.integers(0, 2**16))
def test_a_smaller_graph_has_outputs_of_the_same_shape(model: ir.Model, seed: int):
    channel_graphs.runs(model, seed)


@settings(max_examples=25)
@given(graphs(), st.integers(0, 2**16))
def test_channels_that_may_change_places_leave_the_outputs_as_they_are(model: ir.Model, seed: int):
    channel_graphs.reordered(model, seed)


@settings(max_examples=10)
@given(graphs())
def test_removing_nothing_changes_nothing(model: ir.Model):
    channels = channel_graphs.map_channels(model)
    nothing = np.zeros(channels.count, dtype=bool)
    same, positions = channel_graphs.remove_channels(model, channels, nothing)
    assert positions == {}
    for own, other in zip(channel_graphs.outputs(same), channel_graphs.outputs(model), strict=True):
        assert np.array_equal(own, other)
