"""Adapters, such as LoRA's: what they add to a model's weights is not a model."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import SpecError
from compressor.models.checkpoint.folder import ADAPTER, read_config
from compressor.models.codec.headers import INDEX, WEIGHTS

_WEIGHTS = "adapter_model"  # as peft writes it


def check_no_adapter(path: Path) -> None:
    """Check that a file or folder holds a model's weights, not what an adapter adds to them.

    Raises:
        SpecError: it holds an adapter of ``peft``.
        ModelError: the adapter's configuration is malformed.
    """
    folder = path if path.is_dir() else path.parent
    whole = path.is_dir() and any((folder / name).is_file() for name in (WEIGHTS, INDEX))
    if whole or (path.is_file() and path.stem != _WEIGHTS):
        return
    if not (folder / ADAPTER).is_file():
        return
    base = read_config(folder / ADAPTER).get("base_model_name_or_path")
    of = f" of {base!r}" if isinstance(base, str) and base else ""
    raise SpecError(
        f"checkpoint {str(path)!r}",
        f"is an adapter{of}, not a model",
        "merge the two (merge_and_unload of peft), save_pretrained the result, and give its folder",
    )


def unused_adapter(folder: Path | None) -> tuple[str, ...]:
    """Return a warning for an adapter beside the weights of a whole model."""
    if folder is None or not (folder / ADAPTER).is_file():
        return ()
    return (
        f"{ADAPTER}: an adapter lies beside the model's weights; it is neither applied nor copied. "
        "If the weights do not hold it yet, merge the two (merge_and_unload of peft)",
    )
