"""Outputs of named layers, by hooks in a module and as values in a graph; a student with both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressor.errors import ModelError, SpecError, suggestion
from compressor.graph.layers import with_bias
from compressor.graph.values import value_by_name
from compressor.models.executor import GraphModule
from compressor.models.torch.lowering import NamedModule
from compressor.types.carrier import Capability, Carrier
from compressor.types.data import Samples, calibration_batch
from compressor.types.layers import Layer
from compressor.types.options import Options

FEATURE, ATTENTION = "feature", "attention"
_PROOF_SAMPLES = 4


class LayerPair(Options):
    """A layer of the student and the layer of the teacher that it learns to imitate."""

    student: str = Field(description="layer of the student, by its path")
    teacher: str = Field(
        description="layer of the teacher, by its path; of an ONNX file also a value of the graph"
    )
    weight: float = Field(default=1.0, gt=0, description="weight of the pair's loss")


def check_layer(name: str, carrier: Carrier, where: str) -> None:
    """Raise ``SpecError`` if a name is neither a layer nor a module that holds parameters."""
    names = [layer.name for layer in carrier.layers()]
    if name in names:
        return
    if Capability.TRAIN in carrier.offers:
        for tensor in carrier.tensors():
            parts = tensor.split(".")
            names += [".".join(parts[:length]) for length in range(1, len(parts))]
    if name not in names and name not in value_by_name(carrier.graph()):
        raise SpecError(
            where, f"names {name!r}, which is not a layer", suggestion(name, dict.fromkeys(names))
        )


def layer_values(names: Sequence[str], carrier: Carrier, where: str) -> list[str]:
    """Return the graph's values that are the outputs of layers.

    Raises:
        SpecError: a name is that of a module without a weight of its own, which a graph does not
            have.
    """
    layers = {layer.name: layer for layer in carrier.layers()}
    values = value_by_name(carrier.graph())
    outputs = []
    for name in names:
        if name in layers:
            outputs.append(_with_bias(layers[name], values))
        elif name in values and name not in carrier.graph().graph.initializers:
            outputs.append(name)
        else:
            raise SpecError(
                where,
                f"names {name!r}; the model is executed as a graph, which knows layers with a "
                "weight of their own only",
                suggestion(name, layers),
            )
    return outputs


def executes_graph(module: NamedModule) -> bool:
    """Return whether a model's module executes its graph, and so has no submodules to hook."""
    return isinstance(module.module, GraphModule)


@contextmanager
def hooked(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that receives layers' outputs when the module is run.

    Raises:
        ModelError: a layer returns no tensor.
    """
    seen: dict[str, Tensor] = {}
    parts = dict(module.named_modules())
    handles = []
    for name in dict.fromkeys(names):

        def note(part: nn.Module, given: Any, output: Any, name: str = name) -> None:
            del part, given
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if not tensors:
                raise ModelError(f"layer {name!r}", "returns no tensor", "name another layer")
            seen[name] = tensors[0]

        handles.append(parts[name].register_forward_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def seen_output(seen: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a hooked layer's output; raise ``ModelError`` if it was not run."""
    if name not in seen:
        raise ModelError(f"layer {name!r}", "is not run by the model", "name another layer")
    return seen[name]


def _with_bias(layer: Layer, values: Mapping[str, ir.Value]) -> str:
    """Return the layer's output; for a product whose bias is added after it, the sum."""
    node = values[layer.output].producer()
    if node is None:
        return layer.output
    return with_bias(node, layer)[0].outputs[0].name or layer.output


@dataclass(frozen=True)
class Pairs:
    """Layers of the student and of the teacher whose outputs or attention maps are compared."""

    features: Sequence[LayerPair] = ()
    attention: Sequence[LayerPair] = ()

    @property
    def by_tap(self) -> dict[str, LayerPair]:
        """All pairs by the names under which the student returns outputs; no value has one."""
        return {
            f"{kind}:{index}": pair
            for kind, pairs in ((FEATURE, self.features), (ATTENTION, self.attention))
            for index, pair in enumerate(pairs)
        }

    @property
    def teacher_layers(self) -> tuple[str, ...]:
        """The teacher's layers, each once."""
        return tuple(dict.fromkeys(pair.teacher for pair in self.by_tap.values()))

    @property
    def where(self) -> str:
        """The options that name layers, for messages."""
        return "features" if self.features else "attention"


class Projection(nn.Module):
    """A trained linear map of one axis: for that of channels, a 1x1 convolution."""

    def __init__(self, axis: int, width: int, projected: int):
        super().__init__()
        self._axis = axis
        self.linear = nn.Linear(width, projected)

    def forward(self, values: Tensor) -> Tensor:
        """Map ``[..., width, ...]`` to ``[..., projected, ...]``."""
        mapped: Tensor = self.linear(values.movedim(self._axis, -1))
        return mapped.movedim(-1, self._axis)


class Student(NamedModule):
    """A network that also returns outputs of layers, projected to the teacher's widths.

    Beside the model's own outputs it returns taps: by name a layer, or one of ``named``'s outputs
    if that executes its graph.
    """

    def __init__(self, named: NamedModule, outputs: Sequence[str], taps: Mapping[str, str]):
        super().__init__(named.module, named.inputs, named.outputs)
        self._model_outputs = tuple(outputs)
        self._taps = dict(taps)
        self._by_hooks = not executes_graph(named)
        self.projections = nn.ModuleDict()

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Run the network; see :class:`NamedModule`."""
        inputs = {name: tensors[name] for name in self.inputs}
        with hooked(self.module, list(self._taps.values()) if self._by_hooks else []) as seen:
            outputs = super().forward(**inputs)
        result = {name: outputs[name] for name in self._model_outputs}
        for tap, source in self._taps.items():
            value = seen_output(seen, source) if self._by_hooks else outputs[source]
            result[tap] = self.projections[tap](value) if tap in self.projections else value
        return result


def make_student(carrier: Carrier, pairs: Pairs, samples: Samples | None = None) -> NamedModule:
    """Return a copy of a model to train that also returns the outputs of ``pairs``' layers.

    Args:
        samples: calibration data; a module that executes a graph is compared with it on some.

    Raises:
        SpecError: a name is no module, or the graph does not have it.
        ModelError: the graph with these outputs cannot be trained.
    """
    taps = {tap: pair.student for tap, pair in pairs.by_tap.items()}
    named = carrier.trainable()
    assert isinstance(named, NamedModule)
    outputs = [output.name for output in carrier.outputs]
    if not taps:
        return named
    if not executes_graph(named):
        modules = dict(named.module.named_modules())
        for name in taps.values():
            if name not in modules:
                raise SpecError(
                    pairs.where,
                    f"names {name!r}, which is no module of its own",
                    "name the module that it belongs to",
                )
        return Student(named, outputs, taps)
    values = layer_values(list(taps.values()), carrier, pairs.where)
    graph = carrier.graph().clone()
    present, by_name = {output.name for output in graph.graph.outputs}, value_by_name(graph)
    graph.graph.outputs.extend(by_name[v] for v in dict.fromkeys(values) if v not in present)
    wider = carrier.with_trainable_graph(
        graph, (), probe=calibration_batch(samples, _PROOF_SAMPLES)
    )
    if Capability.TRAIN not in wider.offers:
        raise ModelError(
            f"layers {', '.join(taps.values())}",
            "are not available while the model is trained",
            f"leave {pairs.where} out",
        )
    named = wider.trainable()
    assert isinstance(named, NamedModule)
    return Student(named, outputs, dict(zip(taps, values, strict=True)))


def fit_widths(
    student: Student,
    pairs: Pairs,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    seed: int = 0,
) -> None:
    """Give the student projections where its layers have other widths than the teacher's.

    Outputs of the student on some samples are given by tap, those of the teacher's layers by layer.

    Raises:
        SpecError: a pair differs in more than width.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for tap, pair in pairs.by_tap.items():
            if tap.startswith(ATTENTION):
                continue
            mine, goal = tuple(ours[tap].shape), tuple(theirs[pair.teacher].shape)
            axes = [i for i, (a, b) in enumerate(zip(mine, goal, strict=False)) if a != b]
            if len(mine) != len(goal) or len(axes) > 1 or 0 in axes:
                raise _other_shape(pair, mine, goal)
            for axis in axes:
                student.projections[tap] = Projection(axis, mine[axis], goal[axis])


def attention_axis(pair: LayerPair, carrier: Carrier, ours: Tensor, theirs: Tensor) -> int:
    """Return the axis that an attention map is summed over.

    Raises:
        SpecError: there are no positions, or the teacher's layer has others.
    """
    mine, goal = tuple(ours.shape), tuple(theirs.shape)
    if len(mine) < 3:
        raise SpecError(
            ATTENTION,
            f"names {pair.student!r}, whose output {list(mine)} has no positions",
            "name a layer before the pooling, or use features",
        )
    convolutions = {layer.name for layer in carrier.layers() if layer.is_convolution}
    axis = width_axis(len(mine), convolution=pair.student in convolutions)
    if mine[:axis] + mine[axis + 1 :] != goal[:axis] + goal[axis + 1 :]:
        raise _other_shape(pair, mine, goal)
    return axis


def width_axis(rank: int, *, convolution: bool) -> int:
    """Return the axis of the channels of a layer's output, or of a token's features.

    If a convolution made an output of three axes, channels are the second.
    """
    return 1 if rank != 3 or convolution else 2


def _other_shape(pair: LayerPair, mine: tuple[int, ...], goal: tuple[int, ...]) -> SpecError:
    return SpecError(
        "layer pair",
        f"the student's {pair.student!r} gives {list(mine)} and the teacher's {pair.teacher!r} "
        f"{list(goal)} for the same samples: more than the width differs",
        "pair layers of the same resolution",
    )
