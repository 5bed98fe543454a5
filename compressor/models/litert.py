"""Run LiteRT files with LiteRT's interpreter, on the CPU.

It is sent to devices, and imports little.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import ArtifactError, cut_line, last_line, message_lines, run_failure
from compressor.models.threads import usual_threads
from compressor.types.tensors import Batch, TensorSpec

_PACKAGE = "ai-edge-litert"


class LitertRunner:
    """A file that LiteRT's interpreter has opened, with XNNPACK's kernels.

    Raises:
        ArtifactError: LiteRT does not read the file.
    """

    def __init__(self, path: Path, subject: str):
        from ai_edge_litert.interpreter import Interpreter

        self._subject = subject
        self.runtime = f"litert {version(_PACKAGE)} (CPU)"
        self.threads = usual_threads() or 1
        try:
            with without_greeting():
                self._interpreter: Any = Interpreter(str(path), num_threads=self.threads)
                self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as error:
            # The operator is named in the first line or in the last.
            reason = cut_line(" ".join(message_lines(error)) or type(error).__name__)
            raise ArtifactError(
                subject,
                f"LiteRT does not load it ({reason})",
                f"update {_PACKAGE}, or export it again",
            ) from error
        self._inputs = self._interpreter.get_input_details()
        self._outputs = self._interpreter.get_output_details()

    def run(self, batch: Batch) -> Batch:
        """Run one batch; arrays that the model does not take are ignored.

        Raises:
            ModelError: the runtime fails.
        """
        interpreter = self._interpreter
        try:
            self._fit(batch)
            for details in self._inputs:
                interpreter.set_tensor(
                    details["index"], np.asarray(batch[details["name"]], order="C")
                )
            interpreter.invoke()
        except (RuntimeError, ValueError) as error:
            raise run_failure(self._subject, last_line(error)) from error
        return {x["name"]: interpreter.get_tensor(x["index"]) for x in self._outputs}

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the model takes."""
        return tuple(
            TensorSpec(
                x["name"],
                tuple(None if n < 0 else int(n) for n in x["shape_signature"]),
                np.dtype(x["dtype"]).name,
            )
            for x in self._inputs
        )

    def operators(self) -> Counter[str]:
        """Return how many operators of each kind the file has."""
        details = self._interpreter._get_ops_details()
        return Counter(x["op_name"] for x in details if x["op_name"] != "DELEGATE")

    def _fit(self, batch: Batch) -> None:
        """Make room for a batch of another size than the last."""
        changed = False
        for details in self._inputs:
            shape = batch[details["name"]].shape
            if tuple(details["shape"]) != shape:
                self._interpreter.resize_tensor_input(details["index"], shape, strict=True)
                changed = True
        if changed:
            self._interpreter.allocate_tensors()
            self._inputs = self._interpreter.get_input_details()


@contextmanager
def without_greeting() -> Iterator[None]:
    """Keep off the screen what C++ prints when a runtime opens a file."""
    sys.stderr.flush()
    number = os.dup(2)
    nobody = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nobody, 2)
        yield
    finally:
        os.dup2(number, 2)
        os.close(number)
        os.close(nobody)
