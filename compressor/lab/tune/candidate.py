"""A recipe that was made, and what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressor.lab.tune.recipe import Recipe
from compressor.lab.tune.searched import Searched
from compressor.run.artifacts import StoredArtifact
from compressor.run.pipeline import Step
from compressor.run.plan import Plan
from compressor.run.verdicts.statistics import Difference
from compressor.run.verdicts.verdicts import Verdict
from compressor.run.workspace import Workspace


@dataclass
class Candidate:
    """A recipe and what it gives.

    Attributes:
        name: what is special about it, in a few words.
        written: all of its artifacts.
        artifact: what is deployed of it.
        float_bytes: the size that its ratio is to.
        verdict: what the proofs say of the limit of the metric's drop; ``None`` where they have not
            come to it.
    """

    name: str
    recipe: Recipe
    choice: Mapping[str, str]
    plan: Plan
    steps: list[Step]
    written: list[StoredArtifact]
    artifact: StoredArtifact
    workspace: Workspace
    float_bytes: int
    searched: Searched | None = None
    proof: Difference | None = None
    verdict: Verdict | None = None
    latency: Mapping[str, Any] | None = None

    @property
    def bytes(self) -> int:
        """The size of its artifact."""
        return sum(int(file["bytes"]) for file in self.artifact.files)

    @property
    def size_ratio(self) -> float:
        """The size over that of the float model."""
        return self.bytes / self.float_bytes
