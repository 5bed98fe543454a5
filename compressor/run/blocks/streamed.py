"""Apply passes to a streamed checkpoint, with its blocks or data if they need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from safetensors.torch import save_file
from torch import Tensor

from compressor.models.checkpoint.weight_files import read_weights
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.run.blocks.decoder_blocks import decoder_run
from compressor.run.evaluate import RunSamples
from compressor.run.store import Store, result_key
from compressor.run.weight_pass import WeightPass
from compressor.run.workspace import Workspace
from compressor.types.carrier import Carrier
from compressor.types.passes import GraphPass, Outcome, PassContext, Survey

_TENSORS = "tensors.safetensors"


def apply_streamed(
    workspace: Workspace,
    declared: GraphPass | WeightPass,
    carrier: Carrier,
    survey: Survey,
    context: PassContext,
    key: str,
) -> Outcome:
    """Apply a pass to a checkpoint, with its blocks or the data where it has to see these.

    Args:
        survey: what the pass found in it.
        context: what it may know of the spec.
        key: that of its result.
    """
    if isinstance(carrier, BlockCheckpoint):
        if declared.replays:
            return _replayed(workspace, declared, carrier, context, key)
        if (declared.by_block or declared.in_blocks) and survey.requests:
            with decoder_run(workspace, declared.name, key, carrier, survey.requests) as blocks:
                return declared.apply(carrier, replace(context, blocks=blocks), {})
    with workspace.progress.stage(declared.name):
        return declared.apply(carrier, context, {})


def _replayed(
    workspace: Workspace,
    declared: GraphPass | WeightPass,
    carrier: BlockCheckpoint,
    context: PassContext,
    key: str,
) -> Outcome:
    """Apply a pass that runs data by itself: in one process, whose findings the others read."""
    data = workspace.plan.data["calibration"]
    samples = RunSamples(carrier.inputs, data, context.seed)
    kept = KeptInStore(workspace.store, result_key("kept", key), workspace.first)
    if not workspace.first:
        workspace.ranks.wait()
    outcome = declared.apply(carrier, replace(context, samples=samples, kept_tensors=kept), {})
    if workspace.first:
        workspace.ranks.wait()
    return outcome


@dataclass(frozen=True)
class KeptInStore:
    """Intermediate results of a pass in the store; see compressor.types.passes.KeptTensors.

    Args:
        writes: this process is the one that writes.
    """

    _store: Store
    _key: str
    writes: bool

    def read(self) -> Mapping[str, Tensor]:
        """Return the stored tensors, if any."""
        found = self._store.read(self._key)
        return {} if found is None else read_weights(self._store.folder(self._key) / _TENSORS)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors in place of those stored before."""
        if self.writes:
            with self._store.write(self._key) as (folder, _):
                save_file(dict(tensors), folder / _TENSORS)
