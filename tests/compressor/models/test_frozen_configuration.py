"""Modules whose configuration cannot be changed, as those of ``diffusers``."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from tests.compressor.models.smaller_modules import Free, shaken, smaller


class Frozen(OrderedDict[str, int]):
    """Has its entries as attributes, too, and takes no others."""

    def __init__(self) -> None:
        super().__init__(hidden_size=8)
        self.__dict__["hidden_size"] = 8

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise TypeError("is frozen")


class Given(nn.Module):
    """Has its configuration as a property."""

    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace(hidden_size=8)

    @property
    def config(self) -> SimpleNamespace:
        return self.held

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.config.hidden_size)


class Stored(nn.Module):
    """Has a frozen one as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen()

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.config["hidden_size"])


class Network(Free):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.shape = part

    def hidden(self, x: Tensor) -> Tensor:
        rows: Tensor = self.shape(super().hidden(x))
        return rows


@pytest.mark.parametrize("kind", [Given, Stored])
def test_a_width_that_cannot_be_changed_leaves_the_graph(kind: type[nn.Module]) -> None:
    after = smaller(shaken(Network(kind())), 1, 3, 4, 7)
    assert after.executes_graph
