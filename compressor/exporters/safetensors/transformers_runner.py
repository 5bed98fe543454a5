"""Run a Hugging Face directory in ``transformers``."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from compressor.errors import ArtifactError, SpecError, first_line, listed, run_failure
from compressor.models.element_types import from_numpy, to_numpy
from compressor.models.transformers.classes import saved_class, silent
from compressor.types.tensors import Batch

INSTALL = "pip install compressor[transformers]"
FAILURES = (  # what loading raises where a file is damaged or a config disagrees, by trial
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class NetworkRunner:
    """A network of ``transformers`` that is ready to be run.

    Args:
        network: with its weights.
        subject: what messages call it.
        runtime: name and version of what executes it.
    """

    def __init__(self, network: Any, subject: str, runtime: str):
        from transformers.utils.generic import find_labels

        self._subject = subject
        self._model = network
        # Given the right answers, a model returns its loss as well.
        answers: list[str] = find_labels(type(network))  # type: ignore[no-untyped-call]
        self._takes = set(inspect.signature(network.forward).parameters) - set(answers)
        self._has_run = False
        self.runtime = runtime

    def run(self, batch: Batch) -> Batch:
        """Run one batch; labels, and arrays that the model does not take, are ignored.

        Returns:
            The logits as ``output``; where the model returns several tensors, ``output_0``,
            ``output_1``, ... in its order.

        Raises:
            ModelError: the model fails, such as for want of an input.
        """
        taken = {
            name: from_numpy(ir.tensor(array))
            for name, array in batch.items()
            if name in self._takes
        }
        options = {"use_cache": False} if "use_cache" in self._takes else {}
        # Weights are decompressed in the first run, with progress bars.
        silence = nullcontext() if self._has_run else silent()
        try:
            with silence, by_itself(), torch.inference_mode():
                result = self._model(**taken, **options, return_dict=True)
        except FAILURES as error:
            raise run_failure(self._subject, first_line(error)) from error
        self._has_run = True
        tensors = [value for value in result.to_tuple() if isinstance(value, torch.Tensor)]
        names = ["output"] if len(tensors) == 1 else [f"output_{i}" for i in range(len(tensors))]
        return {name: to_numpy(tensor) for name, tensor in zip(names, tensors, strict=True)}


class TransformersRunner(NetworkRunner):
    """A model that ``transformers`` loaded from a directory, as it is, without its own code.

    Raises:
        ArtifactError: ``transformers`` or compressed-tensors is not installed, the model is of a
            class that ``transformers`` does not have, or it cannot be loaded whole.
    """

    def __init__(self, directory: Path):
        subject = f"artifact {directory.name!r}"
        network, loading = load_directory(directory, subject)
        _check_whole(loading, subject)
        super().__init__(network, subject, runtime())


def runtime() -> str:
    """Return name and version of the library and of what it computes with."""
    import transformers

    return f"transformers {transformers.__version__} (torch {torch.__version__})"


def _check_whole(loading: dict[str, Any], subject: str) -> None:
    """Check that no tensor was missing: its values would be random."""
    names = sorted(str(key) for key in loading["missing_keys"])
    names += sorted(str(key[0]) for key in loading["mismatched_keys"])
    if names:
        raise ArtifactError(
            subject,
            f"transformers finds no values for {len(names)} of its tensors: {listed(names)}",
            "it stores a layer in a way that the model's class does not know; skip the layer "
            "by a rule",
        )


def load_directory(
    directory: Path, subject: str, dtype: torch.dtype | str = "auto"
) -> tuple[Any, dict[str, Any]]:
    """Return the model that a directory holds, and the library's report on loading it.

    Args:
        dtype: what it computes in; by default, what its config.json names.

    Raises:
        ArtifactError: as :class:`TransformersRunner`, except that tensors may be missing.
    """
    try:
        with silent():
            import transformers
            from huggingface_hub.errors import StrictDataclassError
            from safetensors import SafetensorError
        model_class = saved_class(directory)
    except ImportError as error:
        raise ArtifactError(subject, f"needs {_missing(error)}", INSTALL) from error
    except SpecError as error:
        remedy = f"{error.remedy}; or leave out this export"
        raise ArtifactError(subject, error.problem, remedy) from error
    try:
        with silent(), by_itself():
            model, loading = model_class.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except ImportError as error:
        raise ArtifactError(subject, f"needs {_missing(error)}", INSTALL) from error
    except (*FAILURES, SafetensorError, StrictDataclassError) as error:
        raise ArtifactError(
            subject,
            f"transformers {transformers.__version__} does not load it ({first_line(error)})",
            "export it again, or leave out this export",
        ) from error
    return model.eval(), loading


@contextmanager
def by_itself() -> Iterator[None]:
    """Let this process prepare, load and run a model of codes without the others of ``torchrun``.

    Only the first process opens artifacts. compressed-tensors shares layers out among all processes
    of PyTorch's default group, and would wait for those that do something else.
    """
    if importlib.util.find_spec("compressed_tensors") is None:
        yield
        return
    from compressed_tensors.offload import as_single_threaded

    with as_single_threaded():
        yield


def _missing(error: ImportError) -> str:
    package = (error.name or "").partition(".")[0].replace("_", "-")
    return package or ("compressed-tensors" if "compressed" in str(error) else "transformers")
