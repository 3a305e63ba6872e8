"""What hosts say to each other that hold a store in portions.

The coordinator (the owner of the run) dials every holder, and so does every other host: a worker's
gradient goes in pieces straight to who holds that portion, and fresh weights come back the same
way. A holder tells the coordinator what arrived; only what has arrived everywhere is decided on. What
is decided is a numbered `PortionOrder`, carried out in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.decoding import MessageDecoder
from paceline.store.layout import Layout
from paceline.store.optimizers import OptimizerSpec
from paceline.store.spread.portions import Deed, Portion, SumOrder, own_missing, used_of
from paceline.store.spread.slices import slices_of

COORDINATOR = 0
"""Its number among the hosts; others count from 1."""
ASIDE = 0xFFFE
"""The lane of what concerns no worker."""
MASTER, STATE, SHOWN = 8, 9, 10
"""Memories of the holder's: its portion of the weights, its optimizer's state; and the weights once more, for
a worker that writes to them."""


class HolderPlace(msgspec.Struct, frozen=True):
    """A host that holds a portion."""

    number: int
    name: str
    address: tuple[str, int]


class PortionPlan(msgspec.Struct, frozen=True, tag="Plan"):
    """Who holds what. The first portion is the coordinator's, the next ones are the holders', in order."""

    number: int
    """Of the host that is told."""
    shared: bool
    """Whether all workers of a host read one buffer."""
    layout: Layout
    optimizer: OptimizerSpec
    portions: tuple[Portion, ...]
    holders: tuple[HolderPlace, ...]
    clip_norm: float | None = None
    """To which the norm of every step's gradient is clipped, over all portions."""
    correct: str = "none"
    """How stale gradients are corrected."""
    origins: tuple[int, ...] = ()
    """If layout and optimizer are those of slices: which parameter of the model each is of."""

    def missing_in(self, portion: Portion, missing: Sequence[int]) -> tuple[int, ...]:
        """What of a portion lacks a gradient, if these parameters of the model do."""
        return own_missing(slices_of(missing, self.origins), portion)

    def portion_of(self, number: int) -> Portion | None:
        """What a host holds."""
        held = {holder.number: place + 1 for place, holder in enumerate(self.holders)}
        return self.portions[held[number]] if number in held else None

    @property
    def first_spans(self) -> list[tuple[int, int]]:
        """The coordinator's own weights, and those that nobody trains."""
        return used_of(self.layout, self.portions[0]).weights


class GradientPiece(msgspec.Struct, frozen=True, tag="Piece"):
    """A worker's gradient, as far as it is yours, is complete: its n-th one."""

    number: int
    missing: tuple[int, ...] = ()


class Contents(msgspec.Struct, frozen=True, tag=True):
    """Optimizer state of this size is about to come, then the portion's weights."""

    size_bytes: int
    values: dict[str, Any]


class Complete(msgspec.Struct, frozen=True, tag=True):
    """Contents are complete."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """This worker of that host gets the weights as they are now."""

    host: int
    lane: int
    version: int
    own: bool = False
    """Whether it is to get the weights themselves, though others compute on a look-ahead."""


class PortionOrder(msgspec.Struct, frozen=True, tag="Order"):
    """What to do now, in this order; orders are numbered from 1 and none is left out."""

    number: int
    deeds: list[Deed | SumOrder | Wake]


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Send your contents."""


class ShowWeights(msgspec.Struct, frozen=True, tag=True):
    """Send your weights alone: a worker is to write to them."""


class WeightsShown(msgspec.Struct, frozen=True, tag=True):
    """My weights are there. What comes back takes their place."""


class OrdersDone(msgspec.Struct, frozen=True, tag="Done"):
    """The run is over; nobody needs the portion any more."""


class Fresh(msgspec.Struct, frozen=True, tag=True):
    """A worker's weights are up to date, as far as they are mine."""


class PieceStaged(msgspec.Struct, frozen=True, tag="Staged"):
    """A gradient has arrived."""

    host: int
    lane: int
    number: int
    squares: list[float]
    """What makes its norm, in this portion."""
    bad: str | None = None
    """A parameter whose gradient is not finite."""


class Summed(msgspec.Struct, frozen=True, tag=True):
    """What an order wanted to be added up is."""

    order: int
    squares: list[float]
    """What makes its norm, in this portion."""


class Broke(msgspec.Struct, frozen=True, tag=True):
    """The portion is of no use any more."""

    text: str


ToHolder = GradientPiece | Contents | Complete | PortionOrder | Gather | ShowWeights | OrdersDone
FromHolder = Fresh | PieceStaged | Summed | Contents | Complete | WeightsShown | Broke
to_holder: MessageDecoder[ToHolder] = MessageDecoder(ToHolder)
from_holder: MessageDecoder[FromHolder] = MessageDecoder(FromHolder)
