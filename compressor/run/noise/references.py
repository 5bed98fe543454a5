"""What the layers of a model are compared with one by one, where that is not the float model.

A layer whose channels were scaled writes multiples of what the float model's layer writes, and
later layers make up for it. So it is compared with a float model whose channels are scaled alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compressor.graph.values import main_values
from compressor.types.carrier import Carrier


@dataclass(frozen=True)
class Reference:
    """A float model with scaled channels, or a trained model.

    Attributes:
        key: key of its content.
        given: it was made of the model before a pass, and so has the noise of that model.
    """

    key: str
    carrier: Carrier
    given: bool = False


def save_reference(
    rescale: Callable[[Carrier], Carrier], given: Carrier, exact: Carrier, folder: Path
) -> bool:
    """Save the float model with its channels scaled as a pass scaled those of its model.

    That can be done if both have the same parameters and values. Otherwise, as where channels were
    removed, the model that the pass was given is scaled instead.

    Args:
        rescale: scales a model's channels.
        given: the model before the pass.
        exact: the float model in the same form; the same object where nothing was lost so far.
        folder: made, to save it in.

    Returns:
        Whether it was made of the model before the pass.
    """
    fits = exact is not given and _form(exact) == _form(given)
    folder.mkdir()
    rescale(exact if fits else given).save(folder)
    return not fits


def _form(carrier: Carrier) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    shapes = {name: tensor.shape for name, tensor in carrier.tensors().items()}
    return shapes, set(main_values(carrier.graph()))
