"""An LSTM split by its units: all gates of a unit are one worker's, and the state is gathered at every step.

The cell state of a unit never leaves its owner. Forward gathers the hidden state once per time step and
layer, for the next step and the layer above alike; backward reduces its gradient to the owners as often, but
for the last step of the uppermost layer, whose state goes out of the LSTM only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.layers.block_line import BlockLine
from paceline.parallel.layers.blocks import Blocks
from paceline.parallel.layers.exchanging import enter, fork
from paceline.parallel.layers.split_layers import SplitLayer

State = tuple[Tensor, Tensor]


class RowLSTM(SplitLayer):
    """Takes and gives what nn.LSTM does, packed sequences excepted."""

    def __init__(self, line: BlockLine, blocks: Blocks, layer: nn.LSTM) -> None:
        super().__init__(line, blocks)
        self.input_size, self.hidden_size = layer.input_size, layer.hidden_size
        self.num_layers, self.batch_first, self.dropout = layer.num_layers, layer.batch_first, layer.dropout
        self.bidirectional = layer.bidirectional
        named = layer.named_parameters()
        self.take(layer, {name: blocks.piece(tuple(p.shape), 0, repeats=4) for name, p in named})

    def forward(self, x: Any, state: State | None = None) -> tuple[Tensor, State]:
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise ConfigError(
                f"a split LSTM takes a batch of sequences of one length, as a tensor of 3 dimensions, got "
                f"{type(x).__name__}. Pad the sequences, or leave the layer whole (row_split smallest=...)."
            )
        x = x.transpose(0, 1) if self.batch_first else x
        out, states = enter(x, self.line), []
        directions = ("", "_reverse") if self.bidirectional else ("",)
        for depth in range(self.num_layers):
            top = depth == self.num_layers - 1
            made = []
            for number, suffix in enumerate(directions):
                first = self._first(state, depth * len(directions) + number, x)
                steps, last = self._run(out, first, f"l{depth}{suffix}", top)
                made.append(steps)
                states.append(last)
            out = made[0] if len(made) == 1 else torch.cat(made, 2)
            if not top and self.dropout:
                out = F.dropout(out, self.dropout, self.training)
        hidden, cells = (torch.stack(each) for each in zip(*states, strict=True))
        return (out.transpose(0, 1) if self.batch_first else out), (hidden, cells)

    def _first(self, state: State | None, number: int, x: Tensor) -> State:
        """The whole hidden state before the first step, and this worker's block of the cells'."""
        if state is None:
            return x.new_zeros(x.shape[1], self.hidden_size), x.new_zeros(x.shape[1], self.blocks.own)
        start, end = self.blocks.span
        return enter(state[0][number], self.line), state[1][number][:, start:end]

    def _run(self, x: Tensor, first: State, name: str, top: bool) -> tuple[Tensor, State]:
        """One layer in one direction."""
        inputs = F.linear(x, getattr(self, f"weight_ih_{name}"), getattr(self, f"bias_ih_{name}", None))
        weight, bias = getattr(self, f"weight_hh_{name}"), getattr(self, f"bias_hh_{name}", None)
        (hidden, cell), outputs = first, []
        backwards, sizes = name.endswith("_reverse"), list(self.blocks.sizes)
        times = range(len(x) - 1, -1, -1) if backwards else range(len(x))
        for t in times:
            gates = inputs[t] + F.linear(hidden, weight, bias)
            take, forget, new, give = gates.chunk(4, 1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(take) * torch.tanh(new)
            hidden, out = fork(torch.sigmoid(give) * torch.tanh(cell), self.line, sizes)
            outputs.append(out if top else hidden)
        last = outputs[-1] if top else out
        steps = torch.stack(outputs[::-1] if backwards else outputs)
        return steps, (last, self._whole_cells(cell))

    def _whole_cells(self, cell: Tensor) -> Tensor:
        """The last cell state, whole, for whoever asks."""
        return fork(cell, self.line, list(self.blocks.sizes))[1]
