"""Calibrate a checkpoint block by block, from its files: memory holds one block.

Each block is run over the calibration data in stages, as
:mod:`compressor.run.blocks.blockwise` runs those of a graph: for the statistics of a stage's
layers, with the earlier layers as the pass has changed them, and once more for what enters the
next block. What flows between blocks lies in files, and what a pass makes of a stage in the store,
so that a run that was killed goes on with the next one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from compressor.calibration.collect import collect
from compressor.errors import DataError
from compressor.files import disk_errors
from compressor.models.checkpoint.dequantized import mapped
from compressor.models.resident_memory import return_freed_memory
from compressor.models.rounded_inputs import round_inputs_of
from compressor.models.transformers.block_checkpoint import BlockCheckpoint, opened_block
from compressor.models.transformers.block_stages import Stage
from compressor.models.transformers.decoder import KEYS, VALUES, observing
from compressor.models.transformers.single_experts import experts_of
from compressor.progress import Advance
from compressor.run.blocks.flow import Flow
from compressor.run.blocks.stored_changes import for_the_block, restored, saved
from compressor.run.store import result_key
from compressor.run.weight_pass import Changes
from compressor.run.workspace import Workspace
from compressor.types.data import share
from compressor.types.layers import WeightCodes
from compressor.types.statistics import Request
from compressor.types.tensors import Batch

_CHANGES = "changes.safetensors"
_TOKENS, _HIDDEN = "input_ids", "hidden"
_VERSION = 3  # of what is stored


@contextmanager
def decoder_run(
    workspace: Workspace,
    label: str,
    key: str,
    carrier: BlockCheckpoint,
    requests: Sequence[Request],
) -> Iterator[DecoderBlocks]:
    """Yield the stages of a checkpoint's blocks for a pass, with the run's calibration data.

    Args:
        key: that of the pass's result. What flows between blocks lies in a folder of that name
            until the pass is done.
    """
    data = workspace.plan.data["calibration"]
    blocks = len(carrier.decoder.blocks)
    total = None if data.runs is None else blocks * data.runs
    with workspace.progress.stage(f"{label}: block by block", total) as advance:
        batches = list(share(data.batches(), workspace.ranks))
        yield DecoderBlocks(workspace, key, carrier, requests, batches, advance)
    workspace.ranks.wait()
    if workspace.first:
        shutil.rmtree(workspace.store.partial(key), ignore_errors=True)


class DecoderBlocks:
    """The blocks of a checkpoint in stages; see :class:`compressor.types.statistics.Blocks`."""

    def __init__(
        self,
        workspace: Workspace,
        key: str,
        carrier: BlockCheckpoint,
        requests: Sequence[Request],
        batches: Sequence[Batch],
        advance: Advance,
    ):
        self.workspace = workspace
        self.key = key
        self.carrier = carrier
        self.requests = tuple(requests)
        self.folder = workspace.store.partial(key)
        self._tokens = [torch.from_numpy(batch[_TOKENS]) for batch in batches]
        self._advance = advance
        self._ranks = workspace.ranks
        self._flow = Flow(self.folder, "block", workspace.ranks)
        self.samples = sum(len(tokens) for tokens in self._tokens)
        if not sum(self._ranks.gathered(self.samples)):
            raise DataError("calibration data", "has no samples", "give at least one batch")
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """How many stages there are."""
        return sum(len(block.stages) for block in self.carrier.decoder.blocks) + 1

    def __iter__(self) -> Iterator[DecoderStage]:
        """Yield one stage at a time, in the order of execution, and then all other layers."""
        blocks = self.carrier.decoder.blocks
        begun = min(self._ranks.gathered(self._begun()))
        inside: set[str] = set()
        for index, block in enumerate(blocks):
            opened = OpenBlock(self, index)
            for number, stage in enumerate(block.stages):
                inside.update(stage.layers)
                yield DecoderStage(opened, stage, f"{index}.{number}")
            if begun <= index < len(blocks) - 1:
                self._run_on(opened)
            self._advance((index + 1) * self.samples)
            opened.close()
            del opened
            return_freed_memory()
        rest = tuple(x.name for x in self.carrier.layers() if x.name not in inside)
        yield DecoderStage(OpenBlock(self, len(blocks) - 1), Stage(rest, {}), "rest")

    def key_of(self, place: str) -> str:
        """Return the key in the store of a pass's result for a stage."""
        return result_key("block", self.key, place=place, version=_VERSION)

    def _begun(self) -> int:
        """Return the block at which an earlier run was, if what it made of those before is kept.

        A pass that keeps nothing of its stages begins again: it has to see all of them.
        """
        begun = 0
        for index, block in enumerate(self.carrier.decoder.blocks):
            if self._flow.has(index):
                begun = index
            places = (f"{index}.{number}" for number in range(len(block.stages)))
            if any(self.workspace.store.read(self.key_of(place)) is None for place in places):
                break
        return begun

    def batches(self, index: int) -> Iterator[Batch]:
        """Yield the tokens, and what enters a block."""
        for tokens, hidden in self._entering(index):
            yield {_TOKENS: tokens.numpy(), _HIDDEN: hidden.numpy()}

    def _entering(self, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, tokens in enumerate(self._tokens):
            yield tokens, self._flow.entering(self.carrier.decoder, tokens, index, number)

    def _run_on(self, opened: OpenBlock) -> None:
        """Run a block, as it is now, for what enters the next one."""
        values = (opened.run(*batch).numpy() for batch in self._entering(opened.index))
        self._flow.write(opened.index + 1, values)
        self._ranks.wait()  # all go on from the block that the slowest was at, if they are killed
        self._flow.forget(opened.index)


class _AllSeen(Exception):  # nothing is wrong
    """The rest of a block need not be run."""


class OpenBlock:
    """A block in float32, with the changes made to it; opened when it is first run.

    Its matrices lie in mapped files, so that memory is there for what is done to its layers.
    """

    def __init__(self, run: DecoderBlocks, index: int):
        self.index = index
        self.blocks = run
        self._module: torch.nn.Module | None = None
        self._changes: dict[str, WeightCodes | torch.Tensor] = {}

    @property
    def path(self) -> str:
        """Where it is in the network."""
        return self.blocks.carrier.decoder.blocks[self.index].path

    def change(self, changes: Mapping[str, WeightCodes | torch.Tensor]) -> None:
        """Set what its parameters are from now on."""
        self._changes.update(changes)
        if self._module is not None:
            self._put(self._module)

    def run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return what flows out of it for a batch of tokens, given what enters it."""
        decoder = self.blocks.carrier.decoder
        return decoder.run(self.module, hidden, decoder.arguments(tokens)[self.index])

    @property
    def module(self) -> torch.nn.Module:
        """The block with its changes."""
        if self._module is None:
            self.blocks.carrier.check_files()
            self._module = opened_block(self.blocks.carrier, self.index, self.blocks.folder)
            self._put(self._module)
        return self._module

    def close(self) -> None:
        """Give its memory back."""
        self._module = None

    def _put(self, module: torch.nn.Module) -> None:
        carrier, folder = self.blocks.carrier, self.blocks.folder
        layers = {layer.weight: layer for layer in carrier.layers()}
        for name, change in self._changes.items():
            if not name.startswith(f"{self.path}."):
                continue
            if isinstance(change, WeightCodes):
                codes = change.read(carrier.weight)
                value = layers[name].stored(codes.dequantize())
                value = mapped((value,), value.shape, value.dtype, folder)
                if change.inputs is not None:
                    inside = layers[name].name.removeprefix(f"{self.path}.")
                    round_inputs_of(module.get_submodule(inside), change.inputs)
            else:
                value = change
            carrier.decoder.replace(module, self.index, {name: value}, folder)
        self._changes.clear()


@dataclass
class DecoderStage:
    """Layers whose statistics are found when they are asked for; see types.statistics.Block."""

    opened: OpenBlock
    stage: Stage
    place: str

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that are read in it."""
        named = set(self.stage.layers)
        return tuple(x.weight for x in self.opened.blocks.carrier.layers() if x.name in named)

    @cached_property
    def statistics(self) -> Mapping[str, Any]:
        """Results of the requests that lie in it; the block is run as far as the last of them."""
        run = self.opened.blocks
        attention = self._attention()
        read = {
            *self.stage.inputs.values(),
            *(f"{a}{x}" for a in attention for x in (KEYS, VALUES)),
        }
        requests = [request for request in run.requests if read.issuperset(request.tensors)]
        if not requests:
            return {}

        experts = experts_of(self.opened.module).values()

        def outputs(batch: Batch) -> Batch:
            seen: dict[str, Any] = {}

            def observe(name: str, value: torch.Tensor) -> None:
                seen[name] = value.numpy()
                # Of experts it is also counted what they are sent, which may come later.
                if len(seen) == len(read) and not experts:
                    raise _AllSeen

            watched = observing(
                self.opened.module, self.opened.path, self.stage, attention, observe
            )
            with watched, suppress(_AllSeen):
                self.opened.run(*(torch.from_numpy(batch[n]) for n in (_TOKENS, _HIDDEN)))
            return seen

        ranks = run.workspace.ranks
        for each in experts:
            each.reset()
        found: Mapping[str, Any] = collect(
            outputs, run.batches(self.opened.index), requests, None, ranks
        )
        return_freed_memory()  # what is done to layers takes most
        return found

    def _attention(self) -> list[str]:
        """Return the attention with a layer in it of whose keys something was asked."""
        asked = (name for request in self.opened.blocks.requests for name in request.tensors)
        paths = {name.removesuffix(KEYS) for name in asked if name.endswith(KEYS)}
        return [p for p in paths if any(x.startswith(f"{p}.") for x in self.stage.layers)]

    def kept(self, make: Callable[[], Changes]) -> Changes:
        """Return what a pass makes of it, from the store if an earlier run came so far."""
        run = self.opened.blocks
        store, ranks = run.workspace.store, run.workspace.ranks
        key = run.key_of(self.place)
        stored = store.read(key)
        ranks.wait()  # all have looked before the first writes
        if stored is None:
            made = self._with_tokens_sent(make())
            if ranks.rank == 0:
                with store.write(key) as (folder, result):
                    result.update(saved(made, run.carrier, folder / _CHANGES))
            del made
            ranks.wait()
            stored = store.read(key)
            assert stored is not None
        self.__dict__.pop("statistics", None)
        return_freed_memory()
        path = store.folder(key) / _CHANGES
        self.opened.change(for_the_block(path, stored, run.carrier))
        return restored(path, stored, run.carrier)

    def _with_tokens_sent(self, made: Changes) -> Changes:
        """Say of each expert's layers how many calibration tokens the router sends there."""
        if "statistics" not in self.__dict__ or not made.outcomes:
            return made
        path, ranks = self.opened.path, self.opened.blocks.workspace.ranks
        for place, experts in experts_of(self.opened.module).items():
            sent = [sum(each) for each in zip(*ranks.gathered(experts.sent), strict=True)]
            changed = False
            for number, tokens in enumerate(sent):
                for name, outcome in made.outcomes.items():
                    if name.startswith(f"{path}.{place}.{number}."):
                        changed = True
                        details = {**outcome.details, "tokens_sent": tokens}
                        made.outcomes[name] = replace(outcome, details=details)
            if changed:
                note = _sent_note(f"{path}.{place}", sent, everyone=experts.sees_all)
                made.notes += (note,)
        return made

    def replace(self, changes: Mapping[str, WeightCodes | torch.Tensor]) -> None:
        """Do nothing: :meth:`kept` has put the changes in place."""


def _sent_note(path: str, sent: Sequence[int], *, everyone: bool) -> str:
    none = sum(not tokens for tokens in sent)
    rest = f"; {none} are sent none" if none else ""
    return (
        f"{path}: each of {len(sent)} experts was calibrated on "
        f"{'all tokens' if everyone else 'the tokens that it is sent'}; the router sends "
        f"{min(sent):,} to {max(sent):,} to one{rest}"
    )
