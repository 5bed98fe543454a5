"""ResNet-20 pruned by Torch-Pruning, to hold ours against."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from samples.cifar.model import BasicBlock, ZeroPadShortcut


class FixedShortcut(nn.Conv2d):
    """The zero-padding shortcut as a 1x1 convolution that is not trained."""

    def __init__(self, shortcut: ZeroPadShortcut, channels: int):
        outputs = channels + shortcut.before + shortcut.after
        super().__init__(channels, outputs, 1, stride=2, bias=False)
        self.weight.data.zero_()
        for index in range(channels):
            self.weight.data[shortcut.before + index, index] = 1


def with_convolutions(module: nn.Module) -> nn.Module:
    """Return a copy with shortcuts that Torch-Pruning understands; it computes the same."""
    module = copy.deepcopy(module)
    for block in list(module.modules()):
        if isinstance(block, BasicBlock) and isinstance(block.shortcut, ZeroPadShortcut):
            block.shortcut = FixedShortcut(block.shortcut, block.conv1.in_channels)
    return module


def peer(module: nn.Module, ratio: float, everywhere: bool, ignored: list[str]) -> nn.Module:
    """Prune a copy with Torch-Pruning: L2 over whole groups, one shot."""
    import torch_pruning as tp  # type: ignore[import-untyped]  # it has no types

    module = copy.deepcopy(module).requires_grad_(True).eval()
    named = dict(module.named_modules())
    pruner = tp.pruner.BasePruner(
        module,
        torch.zeros(1, 3, 32, 32),
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=everywhere,
        pruning_ratio=ratio,
        ignored_layers=[named[name] for name in ignored],
    )
    # Its step() also counts operations by running the network; groups alone are enough.
    for group in pruner.step(interactive=True):
        group.prune()
    return module


def peer_at(
    module: nn.Module, wanted: int, everywhere: bool, ignored: list[str]
) -> tuple[nn.Module, float]:
    """Return the peer's network with no fewer multiply-accumulates than wanted, and its ratio."""
    low, high = 0.0, 0.95
    best = module
    for _ in range(9):
        ratio = (low + high) / 2
        found = peer(module, ratio, everywhere, ignored)
        if counted(found) >= wanted:
            low, best = ratio, found
        else:
            high = ratio
    return best, low


def counted(module: nn.Module) -> int:
    """Count multiply-accumulates by running a module; faster than lowering it."""
    total = 0

    def note(layer: nn.Module, _: Any, output: torch.Tensor) -> None:
        nonlocal total
        weight = layer.get_parameter("weight")
        total += output.numel() * weight[0].numel()

    layers = [m for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with torch.inference_mode():
        module.eval()(torch.zeros(1, 3, 32, 32))
    for hook in hooks:
        hook.remove()
    return total
