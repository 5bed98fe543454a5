"""An architecture of the zoo pruned by the pass, exported and reloaded, as a module and a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from compressor.errors import SpecError
from compressor.exporters import OnnxExporter, SafetensorsExporter
from compressor.graph.costs import macs
from compressor.models.codec.load import load
from compressor.models.onnx.carrier import OnnxCarrier, open_onnx
from compressor.models.onnx.ort_runner import graph_runner
from compressor.models.torch.carrier import TorchCarrier
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelMap, Flags
from compressor.types.exporter import ExportContext, Exporter
from compressor.types.tensors import Batch
from tests import small_zoo as zoo
from tests.compressor.passes.prune.structured_models import CONTEXT, Given, declared, pruned

WANTED = 0.5
"""The share of the multiply-accumulates that is to remain."""
_ONNX = OnnxExporter(opset=21, target="ort-cpu")


def half(channels: ChannelMap, mixed: bool = True, seed: int = 3) -> Flags:
    """Choose half of each group's units at random, of the groups that may lose some."""
    rng = np.random.default_rng(seed)
    removed = np.zeros(channels.count, dtype=bool)
    for group in channels.groups:
        if not group.frozen and (mixed or not group.mixed):
            removed[rng.permutation(group.units)[: len(group.units) // 2]] = True
    return removed


def run(model: ir.Model, batch: Batch) -> Batch:
    return graph_runner(model).run(batch)


def worst(found: Batch, wanted: Batch) -> float:
    """Return the largest difference of an output, relative to that output's largest value."""
    assert found.keys() == wanted.keys()
    errors = [0.0]
    for name, want in wanted.items():
        assert found[name].shape == want.shape
        assert np.isfinite(found[name]).all(), name
        errors.append(float(np.abs(found[name] - want).max() / np.abs(want).max()))
    return max(errors)


@dataclass(frozen=True)
class Pruned:
    """What the pass made of an architecture.

    Attributes:
        target: the share of the multiply-accumulates that was asked for.
        share: the one that remains.
        proof: largest difference of the masked from the sliced model, as the pass found it in this
            run; ``None`` where an operator mixes all that went.
        unproved: groups that lost units and that an operator mixes.
        carrier: the smaller model.
    """

    target: float
    share: float
    proof: float | None
    unproved: int
    carrier: Carrier


@dataclass(frozen=True)
class Chain:
    """An architecture pruned as a module and as a file.

    Attributes:
        module: by the module.
        file: by the ONNX file that the whole module was exported to.
        effect: how far the smaller module's outputs are from the whole one's.
        reloads: what was read back against the smaller module, by where from.
        difference: the outputs of ``file`` against those of ``module``.
        moved: tensors that both have and that are not the same.
    """

    module: Pruned
    file: Pruned
    effect: float
    reloads: Mapping[str, float]
    difference: float
    moved: tuple[str, ...]


def chain(name: str, folder: Path) -> Chain:
    """Take an architecture through all of it.

    Args:
        name: the architecture's.
        folder: an empty one for the artifacts.
    """
    whole = zoo.carrier(name)
    batch = zoo.batch(whole.inputs)
    module = pruned_to(whole, reachable(whole))
    opened = opened_export(whole, folder / "whole")
    file = pruned_to(opened, reachable(opened))
    wanted = module.carrier.runner().run(batch)
    return Chain(
        module,
        file,
        worst(wanted, whole.runner().run(batch)),
        reload_errors(module.carrier, batch, folder / "smaller"),
        worst(file.carrier.runner().run(batch), wanted),
        different_tensors(module.carrier, file.carrier),
    )


def reachable(model: Carrier) -> float:
    """Return the target: a half, or what the pass says can be reached instead."""
    try:
        declared(target={"macs": WANTED}).survey(model, CONTEXT)
    except SpecError as error:
        found = re.search(r"set it to ([0-9.]+) or more", error.remedy)
        if found is None:
            raise
        return float(found[1])
    return WANTED


def pruned_to(model: Carrier, target: float) -> Pruned:
    """Apply the pass with data to prove the removal on.

    Channels are chosen by the weights and nothing is solved: so a module and its file keep the
    same numbers, and a share is missed by one unit at most.
    """
    samples = Given((zoo.batch(tuple(model.inputs), seed=9),))
    declaration = declared(target={"macs": target}, scope="global", reconstruct=False)
    outcome = pruned(declaration, model, samples)
    share = macs(outcome.carrier.graph()) / macs(model.graph())
    return Pruned(target, share, *_proof(outcome.notes), outcome.carrier)


def _proof(notes: Sequence[str]) -> tuple[float | None, int]:
    """Return the difference that the pass reports, and the number of groups without proof."""
    note = next(n for n in notes if "prove" in n)
    found = re.search(r"were proved on calibration data.* at most (\S+) of", note)
    assert found is not None or note.startswith("no removal could be proved by zeroing"), note
    mixed = re.search(r"the units of (\d+) groups that .* mixes were not", note)
    return float(found[1]) if found else None, int(mixed[1]) if mixed else 0


def reload_errors(model: Carrier, batch: Batch, folder: Path) -> dict[str, float]:
    """Export a model in both formats and compare what is read back with the model.

    Args:
        model: offers run and graph.
        batch: its inputs.
        folder: where the artifacts go, each in a folder of its own.

    Returns:
        The largest differences: of each artifact in its runtime, of ``compressor.load``, and of
        the smaller module itself, if there is one.
    """
    wanted = model.runner().run(batch)
    errors: dict[str, float] = {}
    for exporter in (SafetensorsExporter(), _ONNX):
        path = exported(exporter, model, folder)
        errors[exporter.format] = worst(exporter.open(path).run(batch), wanted)
    module = load(folder / SafetensorsExporter.format)
    with torch.inference_mode():
        tensors = module(**{key: torch.from_numpy(value) for key, value in batch.items()})
    errors["load"] = worst({key: value.numpy() for key, value in tensors.items()}, wanted)
    if isinstance(model, TorchCarrier):
        outputs = model.module_outputs(batch)
        errors["module"] = worst(dict(zip(wanted, outputs, strict=True)), wanted)
    return errors


def exported(exporter: Exporter, model: Carrier, folder: Path) -> Path:
    """Write an artifact into a folder named after its format."""
    directory = folder / exporter.format
    directory.mkdir(parents=True)
    exporter.check(model)
    return exporter.write(model, directory, ExportContext("zoo", ""))[0]


def opened_export(model: Carrier, folder: Path) -> OnnxCarrier:
    """Export a model to ONNX and open the file as another model."""
    return open_onnx(exported(_ONNX, model, folder), _ONNX.opset)


def different_tensors(ours: Carrier, theirs: Carrier) -> tuple[str, ...]:
    """Return the tensors that both have and that are not the same."""
    found = theirs.tensors()
    both = [(name, tensor) for name, tensor in ours.tensors().items() if name in found]
    assert both
    return tuple(n for n, t in both if not torch.equal(t.read(), found[n].read()))
