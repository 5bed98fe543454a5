"""Statistics of one model are gathered once, as far as memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from compressor.calibration.statistics_cache import StatisticsCache
from compressor.types.statistics import ChannelSpans, Moments, Range, Request


class Gathering:
    """Gathers made-up statistics, and notes what it was asked for."""

    def __init__(self, **statistics: Any):
        self.statistics = statistics
        self.asked: list[list[str]] = []

    def __call__(self, requests: Sequence[Request]) -> dict[str, Any]:
        self.asked.append([request.tensor for request in requests])
        return {request.key: self.statistics[request.tensor] for request in requests}


FIRST, SECOND = Request("first", "min-max"), Request("second", "min-max")


def test_only_what_is_missing_is_gathered():
    gather, collected = Gathering(first=Range(0, 1), second=Range(0, 2)), StatisticsCache()
    assert collected.of("model", [FIRST], gather) == {FIRST.key: Range(0, 1)}
    both = collected.of("model", [SECOND, FIRST], gather)
    assert list(both.items()) == [(SECOND.key, Range(0, 2)), (FIRST.key, Range(0, 1))]
    collected.of("model", [FIRST, SECOND], gather)
    assert gather.asked == [["first"], ["second"]]


def test_models_and_observers_share_nothing():
    gather, collected = Gathering(first=Range(0, 1)), StatisticsCache()
    for model in ("one", "other"):
        collected.of(model, [FIRST], gather)
    collected.of("one", [Request("first", "mse")], gather)
    assert gather.asked == [["first"]] * 3


def test_what_exceeds_the_memory_is_gathered_again():
    span = torch.zeros(2, 4)
    held = {
        "small": ChannelSpans(span, span, torch.zeros(4)),  # 80 bytes
        "large": Moments(torch.zeros(1, 4, 4), torch.zeros(1, 4), 3),  # 80, whenever computed
        "array": np.zeros(1, np.float32),
    }
    requests = [Request(name, "min-max") for name in held]
    for most, again in ((160, ["array"]), (159, ["large"]), (79, ["small", "large"])):
        gather, collected = Gathering(**held), StatisticsCache(most)
        for _ in range(2):
            assert collected.of("model", requests, gather).keys() == {r.key for r in requests}
        assert gather.asked == [list(held), again], most
