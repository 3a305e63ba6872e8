"""Linear, convolution and embedding layers of which every worker has a block of the outputs.

A layer's *entry* says what comes in: whole activations, whose gradient has to be summed (`whole`);
activations that go to this layer alone, whose gradient the gather before it sums (`chained`); or this
worker's block of them (`own`: the layer is split by its inputs). Its *exit* says what goes out: everybody's
outputs (`gather`), the same for a split layer that follows (`chain`), or this worker's block (`own`), which a
later module gathers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from paceline.errors import ConfigError
from paceline.parallel.layers.block_line import BlockLine
from paceline.parallel.layers.blocks import Blocks
from paceline.parallel.layers.exchanging import enter, gather, total
from paceline.parallel.pieces import TensorPiece

Entry = Literal["whole", "chained", "own"]
Exit = Literal["gather", "chain", "own"]


class SplitLayer(nn.Module):
    """What the split layers share: who owns what, and what comes in and goes out."""

    weight: Tensor
    bias: Tensor | None
    feature_dim = -1
    """Of its output: where the blocks lie."""

    def __init__(self, line: BlockLine, blocks: Blocks) -> None:
        super().__init__()
        self.line, self.blocks = line, blocks
        self.entry: Entry = "whole"
        self.exit: Exit = "gather"
        self._pieces: dict[str, TensorPiece] = {}

    def take(self, layer: nn.Module, pieces: dict[str, TensorPiece]) -> None:
        """Have a layer's parameters under their names, cut to these pieces; the objects stay the same."""
        self._pieces = pieces
        self.training = layer.training
        for name, parameter in layer.named_parameters(recurse=False):
            if name in pieces:
                parameter.data = pieces[name].of(parameter.data)
            self.register_parameter(name, parameter)
        for name, missing in layer._parameters.items():
            if missing is None:
                self.register_parameter(name, None)

    def pieces(self) -> dict[str, TensorPiece]:
        """Of its parameters."""
        return self._pieces

    def leave(self, own: Tensor) -> Tensor:
        """What goes out."""
        if self.exit == "own":
            return own
        dim = own.ndim - 1 if self.feature_dim < 0 else self.feature_dim
        return gather(own, self.line, list(self.blocks.sizes), dim, self.exit == "chain")


class RowLinear(SplitLayer):
    """A linear layer split by its outputs."""

    def __init__(self, line: BlockLine, blocks: Blocks, layer: nn.Linear) -> None:
        super().__init__(line, blocks)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.take(layer, {name: blocks.piece(tuple(p.shape)) for name, p in layer.named_parameters()})

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.line) if self.entry == "whole" else x
        return self.leave(F.linear(x, self.weight, self.bias))


class ColumnLinear(SplitLayer):
    """A linear layer split by its inputs, of which the layer before gives this worker's block."""

    def __init__(self, line: BlockLine, blocks: Blocks, layer: nn.Linear) -> None:
        super().__init__(line, blocks)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.entry = "own"
        self.take(layer, {"weight": blocks.piece(tuple(layer.weight.shape), 1)})

    def forward(self, x: Tensor) -> Tensor:
        made = total(F.linear(x, self.weight), self.line)
        return made if self.bias is None else made + self.bias


class RowConv(SplitLayer):
    """A convolution split by its output channels."""

    feature_dim = 1

    def __init__(self, line: BlockLine, blocks: Blocks, layer: _ConvNd) -> None:
        super().__init__(line, blocks)
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size = layer.kernel_size
        self._layer = [layer]  # not a part of this module: it computes, with our parameters
        self.take(layer, {name: blocks.piece(tuple(p.shape)) for name, p in layer.named_parameters()})

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.line) if self.entry == "whole" else x
        if x.ndim != len(self.kernel_size) + 2:
            raise ConfigError(
                f"a split convolution takes batches of {len(self.kernel_size) + 2} dimensions, got a "
                f"tensor of shape {tuple(x.shape)}. Add a first dimension: x.unsqueeze(0)."
            )
        compute: Any = self._layer[0]._conv_forward
        return self.leave(compute(x, self.weight, self.bias))


class SplitEmbedding(SplitLayer):
    """An embedding split by its features: every worker has a part of every row of the table."""

    def __init__(self, line: BlockLine, blocks: Blocks, layer: nn.Embedding) -> None:
        super().__init__(line, blocks)
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx, self._by_freq = layer.padding_idx, layer.scale_grad_by_freq
        self.take(layer, {"weight": blocks.piece(tuple(layer.weight.shape), 1)})

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding(x, self.weight, self.padding_idx, scale_grad_by_freq=self._by_freq)
        return self.leave(found)
