"""Put the tensors of a checkpoint into a module, and say what does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from compressor.errors import ModelError, close_names, listed

_OPTIONAL = "num_batches_tracked"
_PART = 1 << 22  # elements looked at together


def check_names(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Compare names and shapes of a checkpoint with those of a module.

    Raises:
        ModelError: a tensor is missing, unexpected, or of another shape; the message names the
            closest ones.
    """
    wanted = module.state_dict(keep_vars=True)
    missing = [n for n in wanted if n not in tensors and not n.endswith(_OPTIONAL)]
    unexpected = [n for n in tensors if n not in wanted]
    problems: list[str] = []
    if missing:
        problems.append(f"lacks {listed(missing)}")
    if unexpected:
        problems.append(f"has unexpected {listed(unexpected)}")
    pairs = [(m, close_names(m, unexpected, 1)) for m in missing[:3]]
    near = [f"{m!r} may be its {names[0]!r}" for m, names in pairs if names]
    if problems:
        raise ModelError(
            f"checkpoint {path!r}",
            " and ".join(problems),
            "; ".join(near) or "check that the factory builds the network that was saved",
        )
    for name, tensor in tensors.items():
        if wanted[name].is_floating_point() and not tensor.is_floating_point():
            raise ModelError(
                f"checkpoint {path!r}",
                f"has {name!r} as {str(tensor.dtype).removeprefix('torch.')}, the module wants "
                "floating point",
                "give the float checkpoint: codes of a quantized one have lost their scales",
            )
        if tensor.shape != wanted[name].shape:
            raise ModelError(
                f"checkpoint {path!r}",
                f"has {name!r} with shape {list(tensor.shape)}, the factory's module wants "
                f"{list(wanted[name].shape)}",
                "build the network with the sizes it was trained with (model.config)",
            )


def load_into(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Copy a checkpoint's tensors into a module in place.

    Raises:
        ModelError: names or shapes differ, or a tensor holds NaN or infinity.
    """
    check_names(module, tensors, path)
    check_finite(tensors, path, may_be_infinite=dict(module.named_buffers()))
    module.load_state_dict(dict(tensors), strict=False)


def check_finite(
    tensors: Mapping[str, torch.Tensor], path: str, may_be_infinite: Collection[str] = ()
) -> None:
    """Raise ``ModelError`` naming the first tensor that holds NaN or infinity.

    Args:
        tensors: what is checked.
        path: where they come from, for the message.
        may_be_infinite: names of tensors, such as masks, in which only NaN is wrong.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        flat = tensor.reshape(-1)
        bad = 0
        for start in range(0, len(flat), _PART):  # in parts: the comparison needs memory too
            part = flat[start : start + _PART]
            wrong = part.isnan() if name in may_be_infinite else ~part.isfinite()
            bad += int(wrong.sum())
        if bad:
            raise ModelError(
                f"checkpoint {path!r}",
                f"tensor {name!r} holds {bad} values that are NaN or infinite",
                "the training diverged or the file is damaged; use an earlier checkpoint",
            )
