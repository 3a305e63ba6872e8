"""The cost model of row-split layers, beside what a step took: weights, sums, bytes, synchronisations.

The formulas are those of the paper's table, layer by layer, for one worker of M: 3·b·P/M multiply-adds; a
gather sends (M-1)/M of what is gathered, a reduction to the owners as much, a sum for everybody both; b is
what a layer sees as batch, in a convolution every place of a map. That is for blocks of equal length. Where M
does not divide the outputs, a worker's own block counts: it goes to M-1 others in a gather, and all but it is
sent in a reduction. The formulas know shapes only. What is measured is what a first step did.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.parallel.layers.block_line import BlockLine, even
from paceline.parallel.layers.blocks import Blocks
from paceline.parallel.layers.lstm import RowLSTM
from paceline.parallel.layers.split_layers import ColumnLinear, RowConv, RowLinear, SplitEmbedding, SplitLayer
from paceline.parallel.pieces import pieces_of


@dataclass
class LayerFigures:
    """Of one step, for one worker."""

    weight_bytes: float = 0.0
    multiply_adds: float = 0.0
    sent_bytes: float = 0.0
    synchronisations: int = 0

    def lines(self, other: LayerFigures) -> list[str]:
        """Beside others, for people."""
        rows = (
            ("weights", f"{self.weight_bytes / 1e6:.3f} MB", f"{other.weight_bytes / 1e6:.3f} MB"),
            ("multiply-adds", f"{self.multiply_adds:,.0f}", f"{other.multiply_adds:,.0f}"),
            ("bytes sent", f"{self.sent_bytes:,.0f}", f"{other.sent_bytes:,.0f}"),
            ("synchronisations", str(self.synchronisations), str(other.synchronisations)),
        )
        return [f"  {name:<17}{model:>18}{measured:>18}" for name, model, measured in rows]


@dataclass
class LayerCosts:
    """Predicts a step from the shapes that its layers see, and measures it."""

    line: BlockLine
    tells: bool = False
    """Whether this worker prints the table."""
    layers: dict[str, SplitLayer] = field(default_factory=dict)
    predicted: LayerFigures = field(default_factory=LayerFigures)
    measured: LayerFigures = field(default_factory=LayerFigures)
    _carriers: dict[int, tuple[nn.Module, bool]] = field(default_factory=dict)
    _whole: list[nn.Module] = field(default_factory=list)
    _counting: Any = None
    _hooks: list[Any] = field(default_factory=list)
    _model: nn.Module | None = None
    _before: tuple[int, int] = (0, 0)

    def add(self, path: str, layer: SplitLayer) -> None:
        """A layer was split."""
        self.layers[path] = layer

    def add_whole(self, module: nn.Module) -> None:
        """A layer stays whole."""
        self._whole.append(module)

    def carried(self, layer: SplitLayer, carrier: nn.Module, chained: bool) -> None:
        """What a layer gives is gathered after another module."""
        self._carriers[id(layer)] = carrier, chained

    # -- the first step -----------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Look at the first step from the first forward in training on."""
        self._model = model
        self._hooks.append(model.register_forward_pre_hook(self._begin))
        for layer in self.layers.values():
            self._hooks.append(layer.register_forward_hook(self._computes))
            if id(layer) in self._carriers:
                carrier, chained = self._carriers[id(layer)]
                self._hooks.append(carrier.register_forward_hook(self._gathers(layer.blocks, chained)))
        for module in self._whole:
            self._hooks.append(module.register_forward_hook(self._computes_whole))

    def _begin(self, model: nn.Module, args: Any) -> None:
        if self._counting is None and model.training:
            self._before = self.line.sent_bytes, self.line.synchronisations
            self._counting = FlopCounterMode(display=False)
            self._counting.__enter__()

    def stepped(self) -> None:
        """The first step is complete: add up, and look no more."""
        if self._counting is None or self._model is None:
            return
        self._counting.__exit__(None, None, None)
        own = sum(p.numel() * p.element_size() for p in self._model.parameters())
        self.measured = LayerFigures(
            own,
            self._counting.get_total_flops() / 2,
            self.line.sent_bytes - self._before[0],
            self.line.synchronisations - self._before[1],
        )
        self.predicted.weight_bytes = self._weights(self._model)
        for hook in self._hooks:
            hook.remove()
        self._model = None
        if self.tells:
            print("\n".join(self.table()), flush=True)

    def table(self) -> list[str]:
        """For people."""
        kept = f", {len(self._whole)} kept whole" if self._whole else ""
        return [
            f"row split of {len(self.layers)} layers over {self.line.size} workers{kept}; one step of one:",
            f"  {'':<17}{'cost model':>18}{'measured':>18}",
            *self.predicted.lines(self.measured),
        ]

    # -- the formulas -------------------------------------------------------------------------

    def _weights(self, model: nn.Module) -> float:
        """This worker's pieces of what is split, all of the rest."""
        pieces, total = pieces_of(model), 0.0
        for name, p in model.named_parameters():
            cut = pieces.get(name)
            share = 1.0 if cut is None else cut.size / cut.shape[cut.dim]
            total += p.element_size() * (p.numel() if cut is None else share * prod(cut.shape))
        return total

    def _gather(self, numbers: int, like: Tensor, blocks: Blocks, times: int = 1) -> None:
        """Every other worker gets this one's block of so many numbers, so many times."""
        self._exchange(times * (self.line.size - 1) * numbers * _share(blocks), like, times)

    def _reduce(self, numbers: int, like: Tensor, blocks: Blocks, times: int = 1) -> None:
        """Everything but this worker's own block goes to its owner, so many times."""
        self._exchange(times * numbers * (1 - _share(blocks)), like, times)

    def _sum(self, numbers: int, like: Tensor) -> None:
        """They are reduced to equal blocks and gathered, at once."""
        own = even(numbers, self.line.size)[self.line.index]
        self._exchange(numbers - own + (self.line.size - 1) * own, like, 1)

    def _exchange(self, numbers: float, like: Tensor, times: int) -> None:
        self.predicted.sent_bytes += round(numbers) * like.element_size()
        self.predicted.synchronisations += times

    def _computes(self, layer: Any, args: Any, out: Any) -> None:
        if self._counting is None:
            return
        x = args[0]
        if isinstance(layer, RowLSTM):
            self._recurrent(layer, x)
            return
        places = self._places(layer, x, out)
        weights = prod(layer.pieces()["weight"].shape)
        if not isinstance(layer, SplitEmbedding):
            self.predicted.multiply_adds += 3 * places * weights * _share(layer.blocks)
        if layer.entry == "whole" and x.requires_grad:
            self._sum(x.numel(), x)
        if isinstance(layer, ColumnLinear):
            self._sum(out.numel(), out)
        elif layer.exit != "own":
            self._gathered(layer.blocks, layer.exit == "chain", out)

    def _gathered(self, blocks: Blocks, chained: bool, out: Tensor) -> None:
        """A layer's outputs; if split layers alone read them, their gradient is reduced to the owners."""
        self._gather(out.numel(), out, blocks)
        if chained and out.requires_grad:
            self._reduce(out.numel(), out, blocks)

    def _gathers(self, blocks: Blocks, chained: bool) -> Any:
        def gathers(module: nn.Module, args: Any, out: Tensor) -> None:
            if self._counting is not None:
                self._gathered(blocks, chained, out)

        return gathers

    @staticmethod
    def _places(layer: Any, x: Tensor, out: Tensor) -> float:
        if isinstance(layer, RowConv):
            return out.numel() / out.shape[1]
        if isinstance(layer, RowLinear | ColumnLinear):
            return x.numel() / x.shape[-1]
        return x.numel()

    def _recurrent(self, layer: RowLSTM, x: Tensor) -> None:
        """T gathers of the state and one of the cells for each layer, and as many reductions of gradients as
        there are states that another split layer reads."""
        batch, steps = (x.shape[0], x.shape[1]) if layer.batch_first else (x.shape[1], x.shape[0])
        ways = 2 if layer.bidirectional else 1
        numbers = batch * layer.hidden_size
        weights = sum(prod(p.shape) for n, p in layer.pieces().items() if n.startswith("weight"))
        self.predicted.multiply_adds += 3 * batch * steps * weights * _share(layer.blocks)
        gathers = ways * layer.num_layers * (steps + 1)
        reductions = ways * (layer.num_layers * steps - 1)
        if x.requires_grad:
            self._sum(x.numel(), x)
        self._gather(numbers, x, layer.blocks, times=gathers)
        self._reduce(numbers, x, layer.blocks, times=reductions)

    def _computes_whole(self, module: Any, args: Any, out: Any) -> None:
        if self._counting is None or not isinstance(module, nn.Linear):
            return
        self.predicted.multiply_adds += 3 * args[0].numel() / args[0].shape[-1] * module.weight.numel()


def _share(blocks: Blocks) -> float:
    """Of the outputs, this worker's."""
    return blocks.own / sum(blocks.sizes)
