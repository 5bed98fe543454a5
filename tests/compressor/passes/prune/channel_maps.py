"""Hand-made and random channel maps, without any graph."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from compressor.types.channels import ChannelGroup, ChannelMap, Member, Product, Units


def chain(
    sizes: list[int],
    spans: list[int] | None = None,
    frozen: frozenset[int] = frozenset(),
    macs: int = 1000,
) -> ChannelMap:
    """Layers ``w0``, ``w1``, ... one behind the other: what one writes, the next reads.

    Args:
        sizes: units of each layer.
        spans: positions that each of a layer's units takes; 1 if not given.
        frozen: layers whose units stay.
        macs: of each layer for one position on both axes.
    """
    spans = spans or [1] * len(sizes)
    starts = np.cumsum([0, *sizes])
    axes: list[Units] = [
        np.repeat(np.arange(start, start + size, dtype=np.int64), span)
        for start, size, span in zip(starts, sizes, spans, strict=False)
    ]
    groups = []
    for i, size in enumerate(sizes):
        members = [Member(f"w{i}", 0, "output")]
        members += [Member(f"w{i + 1}", 1, "input")] if i + 1 < len(sizes) else []
        units = np.arange(starts[i], starts[i] + size, dtype=np.int64)
        reason = "is an output" if i in frozen else ""
        groups.append(ChannelGroup(f"w{i}", units, tuple(members), reason))
    both = [(axes[i], axes[i - 1]) if i else (axes[i],) for i in range(len(sizes))]
    products = tuple(
        Product(f"n{i}", macs * int(np.prod([len(a) for a in own])), own)
        for i, own in enumerate(both)
    )
    parameters = {f"w{i}": (*own, *[None] * (2 - len(own))) for i, own in enumerate(both)}
    return ChannelMap(int(starts[-1]), tuple(groups), parameters, products, (), ())


@st.composite
def chains(draw: st.DrawFn) -> ChannelMap:
    """Chains of up to six layers; the last one's units are frozen, perhaps others too."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=2, max_size=6))
    spans = draw(
        st.lists(st.sampled_from([1, 1, 2, 3, 8]), min_size=len(sizes), max_size=len(sizes))
    )
    others = draw(st.frozensets(st.integers(1, len(sizes) - 1), max_size=2))
    return chain(sizes, spans, others | {len(sizes) - 1})
