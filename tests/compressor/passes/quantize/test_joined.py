"""Parts of a quantized Concat have its step: one of their own clips later samples for nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from compressor.graph.values import constant_array, origin
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.options import StaticActivationOptions, StaticRule
from compressor.passes.quantize.static.static import QuantizeStatic
from compressor.types.carrier import Carrier
from tests.compressor.passes.quantize.static_models import IMAGE, ORT, quantized

INT8 = QuantizeStatic(
    prepare="none",
    activations=StaticActivationOptions(observer="min-max"),
    layers=(StaticRule(match="*"),),
)


class Joined(nn.Module):
    """A small and a large part, joined in front of a convolution."""

    def __init__(self, *, moved: bool = False, twice: bool = False, read: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small, self.large, self.third = (nn.Conv2d(3, 4, 1, bias=False) for _ in range(3))
        self.last = nn.Conv2d(12 if twice else 8, 4, 1)
        self.reader = nn.Conv2d(4, 4, 1)
        self.moved, self.twice, self.read = moved, twice, read
        with torch.no_grad():
            self.small.weight.mul_(0.1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        small, large = self.small(image), self.large(image)
        if self.moved:
            small, large = small[:, :, ::2], large[:, :, ::2]
        whole = torch.cat([small, large], 1)
        if self.twice:
            whole = torch.cat([whole, self.third(image)], 1)
        found: torch.Tensor = self.last(whole)
        return torch.cat([found, self.reader(small)], 1) if self.read else found


def fused(module: nn.Module) -> Carrier:
    return Fuse().apply(TorchCarrier(module, [IMAGE]), ORT, {}).carrier


def steps(model: Carrier) -> list[list[float]]:
    """Return, of each Concat of codes, the steps of what it reads, and of what it writes."""
    found = []
    for node in model.graph().graph:
        uses = [use.node for use in node.outputs[0].uses()]
        if node.op_type != "Concat" or [use.op_type for use in uses] != ["QuantizeLinear"]:
            continue
        makers = [
            origin(value, lambda n: n.op_type != "DequantizeLinear").producer()
            for value in node.inputs
            if value is not None
        ]
        scales = [constant_array(n.inputs[1]) for n in (*makers, *uses) if n is not None]
        found.append([float(scale) for scale in scales if scale is not None])
    return found


@pytest.mark.parametrize(
    ("build", "joins"),
    [(Joined, 1), (partial(Joined, moved=True), 1), (partial(Joined, twice=True), 2)],
    ids=["direct", "moved", "twice"],
)
def test_parts_have_the_step_of_the_whole(build: type[Joined], joins: int) -> None:
    found = steps(quantized(INT8, fused(build())).carrier)
    assert len(found) == joins
    assert len({step for row in found for step in row}) == 1


def test_a_part_that_another_layer_reads_keeps_its_own_step() -> None:
    ((small, large, whole),) = steps(quantized(INT8, fused(Joined(read=True))).carrier)
    assert small < 0.5 * whole
    assert large == whole


def test_no_range_of_a_part_is_asked_for() -> None:
    model = fused(Joined())
    parts = {v.name for n in model.graph().graph if n.op_type == "Concat" for v in n.inputs if v}
    asked = {r.tensor for r in INT8.survey(model, ORT).requests if r.observer == "min-max"}
    assert len(parts) == 2
    assert not parts & asked
