"""Where every tensor of a model lives in two flat pieces of memory.

The *weights* hold all parameters; the store writes them, workers read them. A *segment* belongs to
one worker and holds its gradients and its buffers (BatchNorm's and others). Both are laid out by
dtype, trained parameters first and in the same order, so that the gradients of one dtype are one
flat vector, parallel to the weights they belong to. Tensors start on 64-byte boundaries; the
padding between them stays zero, so flat arithmetic may run over it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor, nn

ALIGN = 64


class Slot(msgspec.Struct, frozen=True):
    """One tensor's place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Bytes from the start: of the weights for a parameter, of the segment for a buffer."""
    gradient: int | None = None
    """Bytes from the start of the segment; None for a parameter that is not trained."""

    @property
    def size_bytes(self) -> int:
        """Bytes of memory the tensor covers."""
        return _numel(self.shape) * _dtype(self.dtype).itemsize

    def view(self, memory: Tensor, offset: int) -> Tensor:
        """The tensor as a view of flat memory, with a version counter of its own.

        And a storage of its own where torch lets us: what is saved, pickled or copied is then this tensor,
        not all of the memory, and tensors of two types do not claim the same bytes.
        """
        dtype = _dtype(self.dtype)
        flat = _own_storage(memory[offset : offset + self.size_bytes]).view(dtype)
        return flat.as_strided(self.shape, self.stride).data


class Region(msgspec.Struct, frozen=True):
    """The trained parameters of one dtype: one flat vector in weights and segment."""

    dtype: str
    weights: int
    gradients: int
    size_bytes: int

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return _dtype(self.dtype).itemsize

    def flat(self, memory: Tensor, offset: int) -> Tensor:
        """The region as one flat vector."""
        return memory[offset : offset + self.size_bytes].view(_dtype(self.dtype))


class Layout(msgspec.Struct, frozen=True):
    """The whole map. Equal layouts mean equal models."""

    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    regions: tuple[Region, ...]
    weights_bytes: int
    segment_bytes: int
    aliases: dict[str, str] = {}
    """Further names of tied parameters."""

    @property
    def trained(self) -> list[Slot]:
        """The parameters that have gradients, in order."""
        return [slot for slot in self.parameters if slot.gradient is not None]

    @property
    def gradient_bytes(self) -> int:
        """What a push carries."""
        return sum(region.size_bytes for region in self.regions)

    @property
    def gradient_end(self) -> int:
        """Where in a segment the gradients end and the buffers begin."""
        return max((region.gradients + region.size_bytes for region in self.regions), default=0)

    def digest(self) -> str:
        """A short name for the layout, to compare workers' models by."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def weight_views(self, weights: Tensor) -> list[Tensor]:
        """All parameters as views of the weights."""
        return [slot.view(weights, slot.offset) for slot in self.parameters]

    def gradient_views(self, segment: Tensor) -> list[Tensor]:
        """The trained parameters' gradients as views of a worker's segment."""
        return [slot.view(segment, slot.gradient) for slot in self.trained if slot.gradient is not None]

    def buffer_views(self, segment: Tensor) -> list[Tensor]:
        """The buffers as views of a worker's segment."""
        return [slot.view(segment, slot.offset) for slot in self.buffers]

    def difference(self, other: Layout) -> str:
        """The first place where two workers' models differ, in words."""
        for mine, theirs in zip(self.parameters, other.parameters, strict=False):
            if (mine.name, mine.shape, mine.dtype) != (theirs.name, theirs.shape, theirs.dtype):
                return f"{mine.name} {list(mine.shape)} against {theirs.name} {list(theirs.shape)}"
        counts = len(self.parameters), len(other.parameters)
        return (
            f"{counts[0]} against {counts[1]} parameters"
            if counts[0] != counts[1]
            else "buffers or frozen parameters"
        )


class Models(nn.ModuleList):
    """Several models as one. What no optimizer trains of it (an averaged teacher) is every worker's own, as
    buffers are: its script writes to it."""

    def __init__(self, models: Iterable[nn.Module], trained: Iterable[Tensor]) -> None:
        super().__init__(models)
        learning = {id(tensor) for tensor in trained}
        idle = [m for m in self if not any(id(p) in learning for p in m.parameters())]
        self.bystanders = {id(p) for model in idle for p in model.parameters()}


def _beside(model: nn.Module) -> set[int]:
    """Parameters that are treated as buffers are."""
    return model.bystanders if isinstance(model, Models) else set()


def named_parameters(model: nn.Module, trained: Iterable[Tensor]) -> dict[str, Tensor]:
    """The model's parameters by name, tied ones once, then trained tensors outside of the model."""
    beside = _beside(model)
    everything = model.named_parameters()
    named: dict[str, Tensor] = {plain_name(name): p for name, p in everything if id(p) not in beside}
    known = {id(p) for p in named.values()}
    for index, tensor in enumerate(t for t in trained if id(t) not in known):
        named[f"optimizer.extra.{index}"] = tensor
    return named


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names under which a parameter stands a second time, and the name it has in the layout."""
    first = {id(p): plain_name(name) for name, p in model.named_parameters()}
    named = ((plain_name(name), p) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: first[id(p)] for name, p in named if first[id(p)] != name}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state."""
    state = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    beside = {plain_name(name): p for name, p in model.named_parameters() if id(p) in _beside(model)}
    return beside | {plain_name(name): b for name, b in model.named_buffers() if plain_name(name) in state}


def buffer_homes(model: nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Where the modules of a model keep their buffers, and by which key: scripts put other tensors there."""
    modules = [(plain_name(f"{name}."[not name :]), module) for name, module in model.named_modules()]
    return {f"{name}{key}": (m._buffers, key) for name, m in modules for key in m._buffers}


def describe(model: nn.Module, trained: Sequence[Tensor]) -> Layout:
    """Lay a model out, and what else is trained."""
    parameters = named_parameters(model, trained)
    learning = {id(tensor): place for place, tensor in enumerate(trained)}
    ordered = sorted(parameters.items(), key=lambda item: _order(item[1], learning))
    slots: list[Slot] = []
    regions: list[Region] = []
    weights = segment = 0
    for name, tensor in ordered:
        size = _padded(tensor)
        gradient = None
        if id(tensor) in learning:
            gradient = segment
            segment += size
            _extend(regions, str(tensor.dtype), weights, gradient, size)
        slots.append(_slot(name, tensor, weights, gradient))
        weights += size
    placed = []
    for name, tensor in named_buffers(model).items():
        placed.append(_slot(name, tensor, segment, None))
        segment += _padded(tensor)
    return Layout(
        tuple(slots),
        tuple(placed),
        tuple(regions),
        max(weights, ALIGN),
        max(segment, ALIGN),
        tied_names(model),
    )


def _order(tensor: Tensor, learning: dict[int, int]) -> tuple[bool, str, int]:
    """Trained parameters first, by dtype, then as the optimizer has them: its groups stay together."""
    return id(tensor) not in learning, str(tensor.dtype), learning.get(id(tensor), 0)


def _extend(regions: list[Region], dtype: str, weights: int, gradients: int, size: int) -> None:
    if regions and regions[-1].dtype == dtype:
        last = regions.pop()
        regions.append(Region(dtype, last.weights, last.gradients, last.size_bytes + size))
    else:
        regions.append(Region(dtype, weights, gradients, size))


def _slot(name: str, tensor: Tensor, offset: int, gradient: int | None) -> Slot:
    shape = tuple(tensor.shape)
    dense = _is_dense(shape, tensor.stride())
    stride = tuple(tensor.stride()) if dense else tuple(torch.empty(shape, device="meta").stride())
    return Slot(name, str(tensor.dtype), shape, stride, offset, gradient)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides cover a block of memory without holes or overlap (channels_last does)."""
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step != expected:
            return False
        expected *= max(length, 1)
    return True


def plain_name(name: str) -> str:
    """A parameter's name without what `torch.compile` puts into it."""
    return name.replace("_orig_mod.", "")


def _own_storage(piece: Tensor) -> Tensor:
    """The same bytes, as all that their storage has; on a device they stay a piece of the whole."""
    if piece.device.type != "cpu" or piece.numel() == 0:
        return piece.clone() if piece.numel() == 0 else piece
    return torch.from_numpy(piece.numpy())


def _padded(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return (size + ALIGN - 1) // ALIGN * ALIGN


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
