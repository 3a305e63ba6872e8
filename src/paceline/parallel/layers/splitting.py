"""`parallelize(model, mesh)`: layers of a user's model are replaced by layers split over the axis `model`.

Parameters stay the same objects under the same names, cut to this worker's block, so an optimizer may be made
before or after. A model on the device `meta` gets its weights here, layer by layer: no worker ever has all of
them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from paceline.errors import ConfigError
from paceline.parallel.layers.block_line import BlockLine
from paceline.parallel.layers.blocks import Blocks, Shares
from paceline.parallel.layers.chains import BRIDGES, Chain, Site, Uses, chain_of, is_plain, keeps_block
from paceline.parallel.layers.costs import LayerCosts
from paceline.parallel.layers.exchanging import gather
from paceline.parallel.layers.lstm import RowLSTM
from paceline.parallel.layers.row_split import RowSplit
from paceline.parallel.layers.split_layers import ColumnLinear, RowConv, RowLinear, SplitEmbedding, SplitLayer
from paceline.parallel.mesh import Mesh, Share
from paceline.protocols.grid import Grid


def parallelize(model: nn.Module, mesh: Grid) -> nn.Module:
    """Split a model's layers by their outputs; what comes back is to be trained. All workers come here.

    On a mesh without an axis `model` (alone, for instance) it is the model as it was.
    """
    if mesh.size("model") == 1:
        return _with_weights(model)
    if not isinstance(mesh, Mesh):
        raise ConfigError("parallelize needs the mesh that pace.mesh() gives.")
    settings = mesh.chosen if isinstance(mesh.chosen, RowSplit) else RowSplit()
    line = BlockLine(mesh)
    share = RowShare(line, LayerCosts(line, tells=mesh.rank == 0))
    mesh.split(share)
    made = Splitter(model, line, settings, share.costs).split()
    share.costs.watch(made)
    return made


class RowShare(Share):
    """Along `model` all workers have the same batch; nothing is left to put together but the books."""

    def __init__(self, line: BlockLine, costs: LayerCosts) -> None:
        super().__init__("model")
        self._line, self.costs = line, costs

    def begin(self) -> None:
        """All draw the same random numbers: dropout has to leave out the same."""
        state = torch.get_rng_state()
        self._line.same(state)
        torch.set_rng_state(state)

    def combine(self, samples: int) -> None:
        self.costs.stepped()


class Splitter:
    """Goes through a model, and splits what can be."""

    def __init__(self, model: nn.Module, line: BlockLine, settings: RowSplit, costs: LayerCosts) -> None:
        self._model, self._line, self._settings, self._costs = model, line, settings, costs
        self._shares = Shares(line.size, line.index)
        self._uses = Uses(model)
        self._tied = _tied(model)
        self._done: set[int] = set()

    def split(self) -> nn.Module:
        """The model, split."""
        root = nn.Module()
        root.model = self._model
        state = torch.get_rng_state()
        self._line.same(state)  # weights of a model on `meta` are drawn here, by all alike
        torch.set_rng_state(state)
        self._visit(Site(root, "model", self._model, ""))
        made = root.model
        assert isinstance(made, nn.Module)
        if any(True for module in made.modules() if isinstance(module, SplitLayer)):
            _call_every_layer(made)
            return made
        raise ConfigError(
            f"row_split finds no layer to split over {self._line.size} workers: Linear, Conv, Embedding or "
            f"LSTM with at least {max(self._settings.smallest, self._line.size)} outputs. Use a wider model, "
            "fewer workers along model, or --set smallest=N."
        )

    def _visit(self, site: Site) -> None:
        module = site.module
        if id(module) in self._done:
            return
        self._done.add(id(module))
        if is_plain(module) and self._uses.once(module):
            self._walk(chain_of(module, site.path))
        elif self._can_split(module):
            site.put(self._row(module, site.path))
        else:
            self._keep_whole(module)
            for name, child in list(module.named_children()):
                self._visit(Site(module, name, child, f"{site.path}.{name}" if site.path else name))

    # -- one layer ----------------------------------------------------------------------------

    def _can_split(self, module: nn.Module) -> bool:
        if not self._uses.once(module) or any(id(p) in self._tied for p in module.parameters()):
            return False
        if isinstance(module, nn.LSTM) and type(module) is nn.LSTM:
            return module.proj_size == 0 and self._is_wide(module.hidden_size)
        if type(module) is nn.Embedding:
            return module.max_norm is None and not module.sparse and self._is_wide(module.embedding_dim)
        if isinstance(module, _ConvNd):
            plain = type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
            return plain and module.groups == 1 and self._is_wide(module.out_channels)
        return type(module) is nn.Linear and self._is_wide(module.out_features)

    def _is_wide(self, outputs: int) -> bool:
        return outputs >= max(self._line.size, self._settings.smallest)

    def _row(self, module: Any, path: str) -> SplitLayer:
        """A layer, split by its outputs."""
        self._same_weights(module)
        kinds: list[tuple[Any, Any, str]] = [
            (nn.Linear, RowLinear, "out_features"),
            (_ConvNd, RowConv, "out_channels"),
            (nn.Embedding, SplitEmbedding, "embedding_dim"),
            (nn.LSTM, RowLSTM, "hidden_size"),
        ]
        kind, outputs = next(
            (made, getattr(module, n)) for known, made, n in kinds if isinstance(module, known)
        )
        numbers = sum(p.numel() for p in module.parameters())
        layer: SplitLayer = kind(self._line, self._shares.deal(outputs, numbers // outputs), module)
        self._costs.add(path, layer)
        return layer

    def _same_weights(self, module: nn.Module) -> None:
        """All workers begin with the first one's weights."""
        if not _materialised(module):
            for tensor in (*module.parameters(), *module.buffers()):
                self._line.same(tensor.detach())

    def _keep_whole(self, module: nn.Module) -> None:
        """Its own parameters, those of its children apart, are everybody's."""
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not _materialised(module):
            for tensor in own:
                self._line.same(tensor.detach())
        if own:
            self._costs.add_whole(module)

    # -- a chain ------------------------------------------------------------------------------

    def _walk(self, chain: Chain) -> None:
        """Split the layers of an nn.Sequential; each knows what comes before and after it."""
        at, before = 0, None
        linked = False
        while at < len(chain.sites):
            site = chain.sites[at]
            original: Any = site.module
            if isinstance(original, nn.LSTM) or not self._can_split(original):
                self._visit(site)
                before, at = None, at + 1
                continue
            self._done.add(id(original))
            layer = self._row(original, site.path)
            site.put(layer)
            layer.entry = "chained" if before is not None else "whole"
            end = at + 1
            while end < len(chain.sites) and keeps_block(chain.sites[end], original, self._uses):
                end += 1
            run = chain.sites[at + 1 : end]
            follower = self._follower(chain, end)
            if self._pairs(original, run, chain, end):
                self._pair(layer, run, chain.sites[end])
                before, at, linked = None, end + 1, True
            else:
                self._gather_after(layer, run, follower is not None)
                before = layer if follower is not None else None
                at = end if follower is None else follower
                for bridge in chain.sites[end:at]:
                    self._done.add(id(bridge.module))
                linked = linked or bool(run) or follower is not None
        if linked:
            self._link(chain)

    def _follower(self, chain: Chain, start: int) -> int | None:
        """The next split layer, if only modules without weights lie between."""
        for at in range(start, len(chain.sites)):
            module = chain.sites[at].module
            if isinstance(module, nn.Linear | _ConvNd) and self._can_split(module):
                return at
            if not isinstance(module, BRIDGES) or not self._uses.once(module):
                return None
        return None

    def _gather_after(self, layer: SplitLayer, run: list[Site], chained: bool) -> None:
        """Gather when the last module has computed that treats channels by themselves."""
        for site in run:
            self._done.add(id(site.module))
            if isinstance(site.module, _BatchNorm):
                self._own_channels(site.module, layer.blocks)
        if not run:
            layer.exit = "chain" if chained else "gather"
            return
        layer.exit = "own"
        told = self._line, list(layer.blocks.sizes), layer.feature_dim, chained
        run[-1].module.register_forward_hook(partial(_gathered, told))
        self._costs.carried(layer, run[-1].module, chained)

    def _own_channels(self, norm: _BatchNorm, blocks: Blocks) -> None:
        """Batch norm of this worker's channels: its statistics are every channel's own."""
        self._same_weights(norm)
        named = [*norm.named_parameters(), *norm.named_buffers()]
        pieces = {name: blocks.piece(tuple(tensor.shape)) for name, tensor in named if tensor.ndim}
        for name, tensor in named:
            if name in pieces:
                tensor.data = pieces[name].of(tensor.data)
        norm.num_features = blocks.own
        norm.pieces = partial(dict, pieces)  # type: ignore[assignment]

    def _pairs(self, layer: nn.Module, run: list[Site], chain: Chain, end: int) -> bool:
        """Whether the next layer can take this worker's block as it is."""
        if not self._settings.pair or type(layer) is not nn.Linear or end >= len(chain.sites):
            return False
        after: Any = chain.sites[end].module
        free = self._uses.once(after) and not any(id(p) in self._tied for p in after.parameters())
        return type(after) is nn.Linear and free and after.in_features == layer.out_features

    def _pair(self, layer: SplitLayer, run: list[Site], after: Site) -> None:
        for site in run:
            self._done.add(id(site.module))
            if isinstance(site.module, _BatchNorm):
                self._own_channels(site.module, layer.blocks)
        layer.exit = "own"
        self._done.add(id(after.module))
        self._same_weights(after.module)
        assert isinstance(after.module, nn.Linear)
        column = ColumnLinear(self._line, layer.blocks, after.module)
        after.put(column)
        self._costs.add(after.path, column)

    def _link(self, chain: Chain) -> None:
        """Layers of a chain refuse to be called apart from it."""
        chain.watch()
        for site in chain.sites:
            module = site.module
            if isinstance(module, SplitLayer) and (module.entry != "whole" or module.exit != "gather"):
                module.register_forward_pre_hook(partial(_check, chain, site.path))


def _gathered(
    told: tuple[BlockLine, list[int], int, bool], module: nn.Module, args: Any, own: Tensor
) -> Tensor:
    line, sizes, feature_dim, chained = told
    dim = own.ndim - 1 if feature_dim < 0 else feature_dim
    if own.shape[dim] != sizes[line.index]:
        raise ConfigError(
            f"{type(module).__name__} after a split layer gave {own.shape[dim]} channels where this worker "
            f"has {sizes[line.index]}. Hold these layers in an nn.ModuleList instead of an nn.Sequential."
        )
    return gather(own, line, sizes, dim, chained)


def _check(chain: Chain, path: str, module: nn.Module, args: Any) -> None:
    chain.check(path)


def _call_every_layer(model: nn.Module) -> None:
    """Without gradients torch's encoder hands its layers' weights to one kernel. Here they are pieces."""
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        torch.backends.mha.set_fastpath_enabled(False)


def _tied(model: nn.Module) -> set[int]:
    """Parameters that several layers share; those layers stay whole."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


def _materialised(module: nn.Module) -> bool:
    """Give a layer on `meta` its weights, drawn as its class does; whether it was one."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in own):
        return False
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"{type(module).__name__} is on the device meta, and has no reset_parameters() to draw its "
            "weights with. Give it one, or make the model on the CPU."
        )
    for name, tensor in module._parameters.items():
        if tensor is not None and tensor.is_meta:
            real = nn.Parameter(torch.empty_like(tensor, device="cpu"), tensor.requires_grad)
            swap: Any = torch.utils.swap_tensors
            swap(tensor, real)
            module._parameters[name] = tensor
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    reset()
    return True


def _with_weights(model: nn.Module) -> nn.Module:
    """Unsplit; layers on `meta` get their weights."""
    for module in model.modules():
        _materialised(module)
    return model
