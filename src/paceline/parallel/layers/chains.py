"""What follows what: in an nn.Sequential one layer's output goes to the next module, and nowhere else.

So a split layer may keep its block through modules that treat every channel by itself (an activation, batch
norm, pooling), and what is gathered for the next split layer needs no gradient of its own on every worker: it
is reduced to the owners. In any other module a layer gathers at once, and its input's gradient is summed at
once: always right, and one exchange more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from paceline.errors import ConfigError
from paceline.parallel.pieces import in_order

POINTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
)
"""Every number by itself, with no weights and no random numbers."""
POOLING = (nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
"""Every channel by itself."""
BRIDGES = (*POINTWISE, *POOLING, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
"""No weights: gradients may be partial there."""


@dataclass
class Site:
    """A module where it stands."""

    parent: nn.Module
    name: str
    module: nn.Module
    path: str

    def put(self, module: nn.Module) -> None:
        """Another one instead."""
        setattr(self.parent, self.name, module)
        self.module = module


@dataclass
class Chain:
    """The modules of an nn.Sequential, those of nested ones included."""

    head: nn.Module
    sites: list[Site] = field(default_factory=list)
    inside: bool = False
    """Whether it is being called as a whole."""

    def watch(self) -> None:
        """Know when it is called."""
        self.head.register_forward_pre_hook(lambda *_: self._set(True))
        self.head.register_forward_hook(lambda *_: self._set(False), always_call=True)

    def check(self, path: str) -> None:
        """Refuse to compute a module apart from the others: what it gives is meant for them alone."""
        if not self.inside:
            raise ConfigError(
                f"layer {path!r} was called apart from the nn.Sequential it is in, where gradients of split "
                "layers are joined. Call the Sequential as a whole, or hold the layers in an nn.ModuleList."
            )

    def _set(self, inside: bool) -> None:
        self.inside = inside


def is_plain(module: nn.Module) -> bool:
    """An nn.Sequential that nobody listens to."""
    return type(module) is nn.Sequential and not module._forward_hooks and not module._forward_pre_hooks


def chain_of(sequential: nn.Module, path: str) -> Chain:
    """Its modules in the order in which they compute."""
    return Chain(sequential, list(_sites(sequential, path)))


def _sites(sequential: nn.Module, path: str) -> Iterator[Site]:
    for name, child in in_order(sequential):
        below = f"{path}.{name}" if path else name
        if is_plain(child):
            yield from _sites(child, below)
        else:
            yield Site(sequential, name, child, below)


class Uses:
    """How often each module of a model stands in it: one that stands twice computes in two places."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_modules(remove_duplicate=False)
        self._counts = Counter(id(module) for _, module in named)

    def once(self, module: nn.Module) -> bool:
        """Whether it stands in one place, and nobody listens to it."""
        return self._counts[id(module)] <= 1 and not module._forward_hooks and not module._forward_pre_hooks


def keeps_block(site: Site, layer: nn.Module, uses: Uses) -> bool:
    """Whether a module computes every channel of this layer's output by itself."""
    module: Any = site.module
    if not uses.once(module):
        return False
    if isinstance(module, _BatchNorm):
        outputs = layer.out_channels if isinstance(layer, _ConvNd) else getattr(layer, "out_features", None)
        return type(module) in (nn.BatchNorm1d, nn.BatchNorm2d) and module.num_features == outputs
    if isinstance(module, POOLING):
        return isinstance(layer, _ConvNd) and not getattr(module, "return_indices", False)
    return isinstance(module, POINTWISE)
