"""The carrier of checkpoints whose decoder blocks can be run, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType

import torch

from compressor.errors import ModelError, SpecError
from compressor.models.checkpoint.carrier import CheckpointCarrier, open_checkpoint
from compressor.models.checkpoint.dequantized import mapped_dequantized
from compressor.models.checkpoint.folder import Checkpoint
from compressor.models.checkpoint.stacked_experts import unstacked
from compressor.models.rounded_inputs import round_inputs_of
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.transformers.cached_attention import round_cache_of
from compressor.models.transformers.carrier import library_version, open_pretrained
from compressor.models.transformers.classes import auto_class_for, saved_from
from compressor.models.transformers.decoder import Decoder, block_list
from compressor.models.transformers.networks import read_config
from compressor.models.transformers.reading import reading_of
from compressor.models.transformers.single_experts import single_experts, sorted_experts
from compressor.models.transformers.stored_names import under_stored_names
from compressor.types.carrier import Capability
from compressor.types.layers import Layer, StoredTensor
from compressor.types.rounded_inputs import CacheScheme, InputScheme
from compressor.types.tensors import TensorSpec

BLOCK = "block."
"""What names of parameters begin with in the graph of a block."""

_CAUSAL = "AutoModelForCausalLM"


class BlockCheckpoint(CheckpointCarrier):
    """A bare checkpoint of a causal language model, which is calibrated block by block.

    Args:
        decoder: runs the float weights of its files.
        original: its tensors before any pass; by default, those that it has.
        single: runs the same with stacked experts as layers of their own, if it has any.
    """

    offers = frozenset({Capability.WEIGHTS, Capability.BLOCKS})
    inputs = (TensorSpec("input_ids", ("batch", "sequence"), "int64"),)

    def __init__(
        self,
        source: Checkpoint,
        tensors: Mapping[str, StoredTensor],
        layers: Sequence[Layer],
        decoder: Decoder,
        original: Mapping[str, StoredTensor] | None = None,
        caches: Mapping[str, CacheScheme] = MappingProxyType({}),
        single: Decoder | None = None,
    ):
        super().__init__(source, tensors, layers, caches)
        self._decoder = decoder
        self._graphs: dict[str, TorchCarrier] = {}
        self._original = dict(tensors) if original is None else original
        self._single = single

    def _like(
        self,
        tensors: Mapping[str, StoredTensor],
        layers: Sequence[Layer],
        source: Checkpoint | None = None,
    ) -> BlockCheckpoint:
        given = (source or self.source, tensors, layers, self._decoder, self._original)
        return BlockCheckpoint(*given, self.caches, self._single)

    def with_caches(self, caches: Mapping[str, CacheScheme]) -> BlockCheckpoint:
        """Return a carrier whose attention keeps rounded keys and values."""
        given = (self.source, self.tensors(), self.layers(), self._decoder, self._original)
        return BlockCheckpoint(*given, {**self.caches, **caches}, self._single)

    @property
    def meaning(self) -> dict[str, object]:
        """The configuration that its blocks are built of, and the version of what builds them."""
        return {**super().meaning, "transformers": library_version()}

    @cached_property
    def decoder(self) -> Decoder:
        """Runs the float weights of its files inside blocks, and around them what passes made."""
        inside = tuple(f"{block.path}." for block in self._decoder.blocks)
        names = [name for name in self.changed("") if not name.startswith(inside)]
        if not names:
            return self._decoder
        changes = Changed(self, names)
        return self._decoder.with_changes(changes, untied=self.source.untied)

    def unstacked(self) -> BlockCheckpoint:
        """Return a carrier whose stacked experts are layers of their own, also in its blocks."""
        if self._single is None:
            return self
        made, before = unstacked(self), self.tensors()
        after = made.tensors()
        changed = any(self._is_other(n, before[n]) for n in before.keys() - after.keys())
        new = {} if changed else {n: t for n, t in after.items() if n not in before}
        given = (made.source, after, made.layers(), self._single, {**self._original, **new})
        return BlockCheckpoint(*given, self.caches)

    def check_files(self) -> None:
        """Check that the weights are still as long as their headers say.

        To read mapped weights of a file that was cut would end the process without a word.

        Raises:
            ModelError: one is missing or was cut.
        """
        for shard in self.source.shards:
            with suppress(OSError):
                if shard.path.stat().st_size == shard.nbytes:
                    continue
            raise ModelError(
                f"checkpoint {str(shard.path)!r}",
                "is missing or has changed since its header was read",
                "put it back as it was (cp -p keeps its time) and run the same command again: "
                "finished blocks are kept",
            )

    def graph_of_block(self, index: int) -> TorchCarrier:
        """Return a block with its graph, without its weights; its parameters begin with `BLOCK`.

        Blocks of one form share it.
        """
        alone = self.decoder.weightless(index)
        form = str(alone)
        if form not in self._graphs:
            inputs = [TensorSpec("hidden", alone.shape, "float32")]
            self._graphs[form] = TorchCarrier(alone, inputs)
        return self._graphs[form]

    def changed(self, path: str, folder: Path | None = None) -> Changed:
        """Return what passes have changed below a path; see :class:`Changed`."""
        names = [
            name
            for name, tensor in self.tensors().items()
            if not path or name.startswith(f"{path}.")
            if tensor.codes is not None or self._is_other(name, tensor)
        ]
        return Changed(self, names, folder)

    def _is_other(self, name: str, tensor: StoredTensor) -> bool:
        original = self._original.get(name)
        return original is None or tensor.read is not original.read

    def rounded_inputs(self, path: str) -> dict[str, InputScheme]:
        """Return how the inputs of layers below a path are rounded, by the layer's name."""
        codes = (t.codes for n, t in self.tensors().items() if n.startswith(f"{path}."))
        return {c.layer.name: c.inputs for c in codes if c is not None and c.inputs is not None}

    @cached_property
    def observed(self) -> Mapping[str, str]:
        """The name of the value that each layer of a block reads, by the layer's name."""
        names = {layer.name for layer in self.layers()}
        return {
            layer: value
            for block in self.decoder.blocks
            for stage in block.stages
            for layer, value in stage.inputs.items()
            if layer in names
        }


def opened_block(
    carrier: BlockCheckpoint, index: int, folder: Path | None = None
) -> torch.nn.Module:
    """Return a block in float32 as the passes have left it; its matrices lie in mapped files.

    Args:
        folder: where these files are made; ``None`` is that of the system's temporary files.

    Raises:
        ModelError: a weight of it is not finite.
        InputError: the disk is full.
    """
    decoder = carrier.decoder
    module, path = decoder.open(index, folder), decoder.blocks[index].path
    decoder.replace(module, index, carrier.changed(path, folder), folder)
    for layer, inputs in carrier.rounded_inputs(path).items():
        round_inputs_of(module.get_submodule(layer.removeprefix(f"{path}.")), inputs)
    for attention, scheme in carrier.caches.items():
        if attention.startswith(f"{path}."):
            round_cache_of(module.get_submodule(attention.removeprefix(f"{path}.")), scheme)
    return module


class Changed(Mapping[str, torch.Tensor]):
    """Float values of changed tensors, in their stored shape; found when they are first read.

    Matrices lie in files without names.

    Args:
        folder: where these files are made; ``None`` is that of the system's temporary files.
    """

    def __init__(self, carrier: BlockCheckpoint, names: Sequence[str], folder: Path | None = None):
        self._tensors = carrier.tensors()
        self._names = tuple(names)
        self._folder = folder
        self._found: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one of them: what codes mean, or what a pass has made of floats."""
        if name not in self._found:
            self._found[name] = mapped_dequantized(self._tensors[name], self._folder)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        """Yield their names."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)


def _first_row(tensors: Mapping[str, StoredTensor], name: str) -> torch.Tensor:
    return tensors[name].read()[0]


def open_blocks(path: Path) -> BlockCheckpoint:
    """Open a Hugging Face directory of a causal language model; its weights stay in their files.

    Raises:
        SpecError: it is not such a directory, ``transformers`` is not installed, or the class
            has no blocks that can be followed.
        ModelError: something is damaged, or weights and configuration disagree.
    """
    carrier = open_checkpoint(path)
    if carrier.folder is None:
        raise SpecError(
            f"checkpoint {str(path)!r}",
            "is no Hugging Face directory, and nothing says how its weights are used",
            "give the directory with config.json, or leave out data and methods that need them",
        )
    named = saved_from(read_config(carrier.folder))
    if auto_class_for(named) != _CAUSAL:
        raise SpecError(
            f"checkpoint {str(path)!r}",
            f"is a {named or 'model of an unknown class'}, and only causal language models are "
            "calibrated block by block from their files",
            "write a spec with model.factory, which runs the whole model in memory",
        )
    module = open_pretrained(_CAUSAL, carrier.folder, {}, ()).module
    tensors, singles = carrier.tensors(), unstacked(carrier)
    reading = reading_of(singles)
    if reading is not None:
        rows = partial(_first_row, tensors)
        single_experts(module, reading.places, reading.merged, rows)
        under_stored_names(module, block_list(module)[0], tensors)
    stacks = {name.rpartition(".")[0] for name in tensors.keys() - singles.tensors().keys()}
    single = Decoder(sorted_experts(module, sorted(stacks))) if stacks else None
    given = (carrier.source, tensors, carrier.layers(), Decoder(module))
    made = BlockCheckpoint(*given, single=single)
    if not made.observed:
        raise SpecError(
            f"checkpoint {str(path)!r}",
            f"has no layer in the blocks of {named} under the name that its class has",
            "write a spec with model.factory, which runs the whole model in memory",
        )
    return made
