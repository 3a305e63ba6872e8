"""Small stand-ins shaped like VGG, ResNet, DenseNet, EfficientNet and ConvNeXt: built alike, of few layers.

They differ as the large ones do in what matters to a strategy: VGG's parameters lie in one wide layer at the
end, DenseNet has many small tensors, EfficientNet and ConvNeXt convolve channel by channel. All normalise
per sample (groups of channels instead of a batch), so that the same samples give the same gradient however
they are split over workers. A model is a row of units: what FSDP2 shards one by one, and what an emulated
device takes its time for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.parallel.plans.hap.emulated_device import EmulatedDevice

CLASSES = 10
GROUPS = 4


class Unit(nn.Module):
    """A part of a model; with a device, it takes that device's time for the samples it gets."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.device: EmulatedDevice | None = None
        self.share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The block's, however long it takes."""
        if self.device is None:
            made: Tensor = self.block(x)
            return made
        return self.device.spend(self.share * len(x), [x], lambda inputs: self.block(inputs[0]))


class Residual(nn.Module):
    """What a block makes, added to what it got."""

    def __init__(self, block: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.skip = block, skip or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        made: Tensor = self.skip(x) + self.block(x)
        return made


class Dense(nn.Module):
    """Every layer gets all that the layers before it made."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(_norm(channels + at * growth), nn.ReLU(), _conv(channels + at * growth, growth))
            for at in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """All of it."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class SqueezeExcite(nn.Module):
    """Squeeze and excite: channels are weighed by what all of them hold."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = (
            nn.Conv2d(channels, channels // 4, 1),
            nn.Conv2d(channels // 4, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Weighed."""
        held = torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.excite(held))


def vgg(channels: int, side: int, width: int) -> list[nn.Module]:
    """Plain convolutions, then wide layers that hold nearly all parameters."""
    left = side // 4
    return [
        nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(2 * width * left * left, 16 * width), nn.ReLU()),
        nn.Sequential(nn.Linear(16 * width, 16 * width), nn.ReLU(), nn.Linear(16 * width, CLASSES)),
    ]


def resnet(channels: int, side: int, width: int) -> list[nn.Module]:
    """Bottlenecks with a way around them."""
    return [
        nn.Sequential(_conv(channels, 2 * width), _norm(2 * width), nn.ReLU()),
        _bottleneck(2 * width, 4 * width, stride=2),
        _bottleneck(4 * width, 4 * width),
        _head(4 * width),
    ]


def densenet(channels: int, side: int, width: int) -> list[nn.Module]:
    """Two dense blocks with a narrowing between."""
    first = width + 3 * width
    return [
        _conv(channels, width),
        Dense(width, width, 3),
        nn.Sequential(_norm(first), nn.ReLU(), nn.Conv2d(first, 2 * width, 1), nn.AvgPool2d(2)),
        Dense(2 * width, width, 3),
        nn.Sequential(_norm(5 * width), nn.ReLU(), _head(5 * width)),
    ]


def efficientnet(channels: int, side: int, width: int) -> list[nn.Module]:
    """Inverted bottlenecks with gates; the first is fused, as in v2."""
    fused = nn.Sequential(
        *(_conv(width, 4 * width), _norm(4 * width), nn.SiLU()),
        *(nn.Conv2d(4 * width, width, 1), _norm(width)),
    )
    return [
        nn.Sequential(_conv(channels, width, 2), _norm(width), nn.SiLU()),
        Residual(fused),
        Residual(_inverted(width)),
        nn.Sequential(nn.Conv2d(width, 8 * width, 1), nn.SiLU(), _head(8 * width)),
    ]


def convnext(channels: int, side: int, width: int) -> list[nn.Module]:
    """Patches, then wide kernels by channel and a wide layer after each."""
    return [
        nn.Sequential(nn.Conv2d(channels, 2 * width, 2, 2), _norm(2 * width)),
        Residual(_next(2 * width)),
        Residual(_next(2 * width)),
        _head(2 * width),
    ]


MODELS: dict[str, Callable[[int, int, int], list[nn.Module]]] = {
    "vgg": vgg,
    "resnet": resnet,
    "densenet": densenet,
    "efficientnet": efficientnet,
    "convnext": convnext,
}
"""Units, for so many channels, pixels a side, and a width."""
PUBLISHED = {
    "vgg": "VGG16, 134.3 M parameters",
    "resnet": "ResNet50, 23.5 M",
    "densenet": "DenseNet121, 7.0 M",
    "efficientnet": "EfficientNetV2-S, 20.2 M",
    "convnext": "ConvNeXt-L, 196.2 M",
}
"""What each stands for, with ten classes."""


def make(name: str, shape: tuple[int, int, int], width: int, seed: int) -> nn.Sequential:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Unit(block) for block in MODELS[name](shape[0], shape[1], width)))


def put_on(model: nn.Sequential, device: EmulatedDevice, batch: int) -> None:
    """Every unit takes an equal part of what the device needs for a batch of so many samples."""
    for unit in model:
        assert isinstance(unit, Unit)
        unit.device, unit.share = device, 1 / len(model) / batch


def parameter_bytes(model: nn.Module) -> int:
    """Of all of them."""
    return sum(value.numel() * value.element_size() for value in model.parameters())


def activation_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd keeps for the backward pass of a batch, parameters aside."""
    own = {value.data_ptr() for value in model.parameters()}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        if value.data_ptr() not in own:
            kept[value.data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        made = model(x)
    del made
    return sum(kept.values())


def _conv(given: int, made: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(given, made, 3, stride, padding=1, bias=False)


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(GROUPS, channels)


def _head(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def _bottleneck(given: int, made: int, stride: int = 1) -> nn.Module:
    inner = made // 2
    block = nn.Sequential(
        *(nn.Conv2d(given, inner, 1, bias=False), _norm(inner), nn.ReLU()),
        *(_conv(inner, inner, stride), _norm(inner), nn.ReLU()),
        *(nn.Conv2d(inner, made, 1, bias=False), _norm(made)),
    )
    skip = None if (given, stride) == (made, 1) else nn.Conv2d(given, made, 1, stride, bias=False)
    return nn.Sequential(Residual(block, skip), nn.ReLU())


def _inverted(channels: int) -> nn.Module:
    wide = 4 * channels
    return nn.Sequential(
        *(nn.Conv2d(channels, wide, 1, bias=False), _norm(wide), nn.SiLU()),
        *(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            _norm(wide),
            nn.SiLU(),
            SqueezeExcite(wide),
        ),
        *(nn.Conv2d(wide, channels, 1, bias=False), _norm(channels)),
    )


def _next(channels: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(channels, channels, 7, padding=3, groups=channels), nn.GroupNorm(1, channels)),
        *(nn.Conv2d(channels, 4 * channels, 1), nn.GELU(), nn.Conv2d(4 * channels, channels, 1)),
    )
