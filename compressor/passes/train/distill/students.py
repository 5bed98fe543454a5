"""A student that also gives what some of its layers put out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from compressor.errors import ModelError, SpecError
from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.distill.losses import Projection, width_axis
from compressor.passes.train.distill.options import LayerPair
from compressor.passes.train.layer_places import (
    executes_graph,
    hooked,
    layer_values,
    seen_output,
    with_outputs,
)
from compressor.types.carrier import Capability, Carrier

FEATURE, ATTENTION = "feature", "attention"


def tap_name(kind: str, index: int) -> str:
    """Return the name under which the student gives a layer's output; no value has it."""
    return f"{kind}:{index}"


@dataclass(frozen=True)
class Pairs:
    """Layers of the student that are to be like layers of the teacher.

    Attributes:
        features: pairs whose outputs are compared.
        attention: pairs whose attention maps are.
    """

    features: Sequence[LayerPair] = ()
    attention: Sequence[LayerPair] = ()

    @property
    def by_tap(self) -> dict[str, LayerPair]:
        """All pairs by the names of their taps."""
        return {
            tap_name(kind, index): pair
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


class Student(NamedModule):
    """A network that gives, besides its outputs, those of layers, projected where that is due.

    Args:
        named: the network; with a graph's values among its outputs where it executes its graph.
        outputs: the model's own outputs.
        taps: what is given beside them: for each name a layer, or one of ``named``'s outputs.
    """

    def __init__(self, named: NamedModule, outputs: Sequence[str], taps: Mapping[str, str]):
        super().__init__(named.module, named.inputs, named.outputs)
        self._own = tuple(outputs)
        self._taps = dict(taps)
        self._by_hooks = not executes_graph(named)
        self.projections = nn.ModuleDict()

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Run the network; see :class:`NamedModule`."""
        inputs = {name: tensors[name] for name in self.inputs}
        with hooked(self.module, list(self._taps.values()) if self._by_hooks else []) as seen:
            found = super().forward(**inputs)
        result = {name: found[name] for name in self._own}
        for tap, source in self._taps.items():
            value = seen_output(seen, source) if self._by_hooks else found[source]
            result[tap] = self.projections[tap](value) if tap in self.projections else value
        return result

    def project(self, tap: str, projection: Projection) -> None:
        """Map what a layer gives to another width, from now on."""
        self.projections[tap] = projection


def make_student(carrier: Carrier, pairs: Pairs) -> NamedModule:
    """Return a copy of a model to train that also gives what ``pairs`` name.

    Raises:
        SpecError: a layer cannot be had.
    """
    taps = {tap: pair.student for tap, pair in pairs.by_tap.items()}
    named = carrier.trainable()
    assert isinstance(named, NamedModule)
    outputs = [output.name for output in carrier.outputs]
    if not taps:
        return named
    if not executes_graph(named):
        known = dict(named.module.named_modules())
        for name in taps.values():
            if name not in known:
                raise SpecError(
                    pairs.where,
                    f"names {name!r}, which is no module of its own",
                    "name the module that it belongs to",
                )
        return Student(named, outputs, taps)
    values = layer_values(list(taps.values()), carrier, pairs.where)
    wider = carrier.with_trainable_graph(with_outputs(carrier.graph(), values), ())
    if Capability.TRAIN not in wider.offers:
        raise ModelError(
            f"layers {', '.join(taps.values())}",
            "cannot be had while the model is trained",
            f"leave {pairs.where} out",
        )
    named = wider.trainable()
    assert isinstance(named, NamedModule)
    return Student(named, outputs, dict(zip(taps, values, strict=True)))


def fit_widths(
    student: Student, pairs: Pairs, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> None:
    """Give the student projections where its layers have other widths than the teacher's.

    Args:
        student: changed in place.
        pairs: the layers.
        ours: what the student gives on some samples.
        theirs: what the teacher's layers give on them, by layer.

    Raises:
        SpecError: a pair differs in more than width.
    """
    for index, pair in enumerate(pairs.features):
        tap = tap_name(FEATURE, index)
        mine, wanted = tuple(ours[tap].shape), tuple(theirs[pair.teacher].shape)
        axes = [i for i, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b]
        if len(mine) != len(wanted) or len(axes) > 1 or 0 in axes:
            raise _other_shape(pair, mine, wanted)
        for axis in axes:
            student.project(tap, Projection(axis, mine[axis], wanted[axis]))


def attention_axis(pair: LayerPair, carrier: Carrier, ours: Tensor, theirs: Tensor) -> int:
    """Return the axis that an attention map is summed over.

    Raises:
        SpecError: there are no positions, or the teacher's layer has others.
    """
    mine, wanted = tuple(ours.shape), tuple(theirs.shape)
    if len(mine) < 3:
        raise SpecError(
            ATTENTION,
            f"names {pair.student!r}, whose output {list(mine)} has no positions",
            "name a layer before the pooling, or use features",
        )
    convolutions = {layer.name for layer in carrier.layers() if layer.is_convolution}
    convolution = pair.student in convolutions
    axis = width_axis(len(mine), convolution=convolution)
    if mine[:axis] + mine[axis + 1 :] != wanted[:axis] + wanted[axis + 1 :]:
        raise _other_shape(pair, mine, wanted)
    return axis


def _other_shape(pair: LayerPair, mine: tuple[int, ...], wanted: tuple[int, ...]) -> SpecError:
    return SpecError(
        "layer pair",
        f"the student's {pair.student!r} gives {list(mine)} and the teacher's {pair.teacher!r} "
        f"{list(wanted)} for the same samples: more than the width differs",
        "pair layers of the same resolution",
    )
