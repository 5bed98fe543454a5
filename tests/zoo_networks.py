"""Our own small networks, one for each structure that a library of language models lacks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def conv_norm(inputs: int, outputs: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    """Return convolution, batch norm and ReLU that keep the resolution."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Pooled(nn.Module):
    """Features, global average pooling and a linear head."""

    def __init__(self, features: nn.Module, channels: int):
        super().__init__()
        self.features = features
        self.head = nn.Linear(channels, 10)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(
            functional.adaptive_avg_pool2d(self.features(image), 1).flatten(1)
        )
        return logits


class UNet(nn.Module):
    """Group norms, transposed convolutions, skips by concatenation."""

    def __init__(self, width: int = 16):
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Sequential:
            steps: list[nn.Module] = []
            for size in (inputs, outputs):
                steps += [nn.Conv2d(size, outputs, 3, padding=1), nn.GroupNorm(4, outputs)]
                steps.append(nn.SiLU())
            return nn.Sequential(*steps)

        self.first, self.second = double(3, width), double(width, 2 * width)
        self.bottom = double(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join_second = double(4 * width, 2 * width)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join_first = double(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        first = self.first(image)
        second = self.second(functional.max_pool2d(first, 2))
        x = self.bottom(functional.max_pool2d(second, 2))
        x = self.join_second(torch.cat([second, self.up_second(x)], 1))
        x = self.join_first(torch.cat([first, self.up_first(x)], 1))
        logits: Tensor = self.head(x)
        return logits


class UpsamplingUNet(nn.Module):
    """A U-Net that enlarges by interpolation to the size of the skip."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.first, self.second = conv_norm(3, width), conv_norm(width, 2 * width)
        self.join = conv_norm(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        first = self.first(image)
        x = self.second(functional.avg_pool2d(first, 2))
        x = functional.interpolate(x, first.shape[2:], mode="bilinear", align_corners=False)
        logits: Tensor = self.head(self.join(torch.cat([x, first], 1)))
        return logits


class DenseBlock(nn.Module):
    """Each layer reads the concatenation of all that came before it."""

    def __init__(self, inputs: int, growth: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + i * growth),
                nn.ReLU(),
                nn.Conv2d(inputs + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def dense_net() -> nn.Module:
    """Return two dense blocks with a transition between them."""
    features = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        DenseBlock(16, 8, 3),
        conv_norm(40, 20, 1),
        nn.AvgPool2d(2),
        DenseBlock(20, 8, 3),
        nn.BatchNorm2d(44),
        nn.ReLU(),
    )
    return Pooled(features, 44)


class Branches(nn.Module):
    """Parallel branches of several widths, concatenated."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.point = conv_norm(inputs, width, 1)
        self.small = nn.Sequential(conv_norm(inputs, width, 1), conv_norm(width, 2 * width))
        self.large = nn.Sequential(
            conv_norm(inputs, width // 2, 1), conv_norm(width // 2, width, 5)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm(inputs, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.point(x), self.small(x), self.large(x), self.pooled(x)], 1)


def inception() -> nn.Module:
    """Return two modules of branches."""
    return Pooled(
        nn.Sequential(conv_norm(3, 16), Branches(16, 8), nn.MaxPool2d(2), Branches(40, 12)), 60
    )


def mobile_net() -> nn.Module:
    """Return depthwise separable convolutions."""
    widths = (16, 32, 32, 64)
    pairs = pairwise(widths)
    steps = [nn.Sequential(conv_norm(a, a, 3, groups=a), conv_norm(a, b, 1)) for a, b in pairs]
    return Pooled(nn.Sequential(conv_norm(3, 16), *steps), 64)


class SqueezeExcite(nn.Module):
    """A residual block whose channels are scaled by what they hold on average."""

    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(conv_norm(width, width), nn.Conv2d(width, width, 3, padding=1))
        self.squeeze, self.excite = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        scale = torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3))))))
        return torch.relu(x + y * scale[:, :, None, None])


def squeeze_excite() -> nn.Module:
    """Return two squeeze-and-excite blocks."""
    return Pooled(nn.Sequential(conv_norm(3, 32), SqueezeExcite(32), SqueezeExcite(32)), 32)


class SuperResolution(nn.Module):
    """Pixel shuffle; the enlarged image is added."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.first = nn.Conv2d(3, width, 5, padding=2)
        self.second = nn.Conv2d(width, 4 * width, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.third = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.shuffle(self.second(torch.relu(self.first(image))))
        enlarged: Tensor = self.shuffle(self.last(torch.relu(self.third(x))))
        return enlarged + functional.interpolate(image, scale_factor=4.0, mode="nearest")


class ShuffleUnit(nn.Module):
    """Half of the channels pass, half are computed; then the two are interleaved."""

    def __init__(self, width: int):
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            conv_norm(half, half, 1),
            conv_norm(half, half, 3, groups=half),
            conv_norm(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        passed, read = x.chunk(2, 1)
        x = torch.cat([passed, self.branch(read)], 1)
        batch, channels, height, width = x.shape
        shuffled: Tensor = x.view(batch, 2, channels // 2, height, width).transpose(1, 2)
        return shuffled.reshape(batch, channels, height, width)


def shuffle_net() -> nn.Module:
    """Return units that shuffle channels, and a grouped convolution with a shuffle after it."""
    steps = [conv_norm(3, 32), ShuffleUnit(32), ShuffleUnit(32), conv_norm(32, 48, 1, groups=4)]
    return Pooled(nn.Sequential(*steps, nn.ChannelShuffle(4), conv_norm(48, 32, 1, groups=2)), 32)


class Grouped(nn.Module):
    """A residual bottleneck whose middle convolution has groups."""

    def __init__(self, width: int, inner: int, groups: int):
        super().__init__()
        self.down = conv_norm(width, inner, 1)
        self.middle = conv_norm(inner, inner, 3, groups)
        self.up = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.up(self.middle(self.down(x))))


def res_next() -> nn.Module:
    """Return residual blocks of grouped convolutions."""
    return Pooled(nn.Sequential(conv_norm(3, 32), Grouped(32, 32, 4), Grouped(32, 32, 4)), 32)


class Bottleneck(nn.Module):
    """The three convolutions of a deep residual network."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.body = nn.Sequential(
            conv_norm(width, inner, 1),
            conv_norm(inner, inner),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def deep_residual(blocks: int = 66) -> nn.Module:
    """Return a residual network of ``3 * blocks + 2`` layers: 200 unless told otherwise."""
    widths = (16, 32, 64)
    steps: list[nn.Module] = [conv_norm(3, widths[0])]
    for index, width in enumerate(widths):
        if index:
            steps += [nn.AvgPool2d(2), conv_norm(widths[index - 1], width, 1)]
        steps += [Bottleneck(width, width // 2) for _ in range(blocks // len(widths))]
    return Pooled(nn.Sequential(*steps), widths[-1])


class Encoder(nn.Module):
    """PyTorch's own encoder layers with batch-first attention."""

    def __init__(self, norm_first: bool):
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
            for _ in range(2)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(32, 5)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(features))
        return logits


class CrossAttention(nn.Module):
    """Queries of one sequence, keys and values of another of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 32), nn.Linear(12, 24)
        self.attention = nn.MultiheadAttention(32, 4, kdim=24, vdim=24, batch_first=True)
        self.head = nn.Linear(32, 6)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        query, source = torch.relu(self.left(left)), torch.relu(self.right(right))
        found, _ = self.attention(query, source, source, need_weights=False)
        logits: Tensor = self.head(query + found)
        return logits


class Recurrent(nn.Module):
    """An LSTM and a GRU between layers that could be narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.project = nn.Linear(24, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.gru = nn.GRU(32, 16, batch_first=True, bidirectional=True)
        self.inner, self.head = nn.Linear(32, 48), nn.Linear(48, 7)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, _ = self.lstm(torch.relu(self.project(self.embed(input_ids))))
        x, _ = self.gru(x)
        logits: Tensor = self.head(torch.relu(self.inner(x)))
        return logits


class Volumes(nn.Module):
    """Convolutions over one and over three spatial axes, joined by a broadcast product."""

    def __init__(self) -> None:
        super().__init__()
        self.sound = nn.Sequential(nn.Conv1d(4, 16, 5, 2, 2), nn.PReLU(16), nn.Conv1d(16, 24, 3))
        self.volume = nn.Sequential(nn.Conv3d(1, 16, 3), nn.InstanceNorm3d(16, affine=True))
        self.narrow = nn.Conv3d(16, 24, 1)
        self.head = nn.Linear(24, 3)

    def forward(self, sound: Tensor, volume: Tensor) -> Tensor:
        heard = self.sound(sound).amax(2)
        seen = self.narrow(functional.leaky_relu(self.volume(volume)))
        logits: Tensor = self.head((seen * heard[:, :, None, None, None]).mean((2, 3, 4)))
        return logits
