"""Carries vectors by torch.distributed, from worker to worker.

What happens is as with shared memory: a worker comes to a joint operation, tells the meeting place, and is
answered when all have come. But the answer only says who takes part, in which shares; the vectors then go
from worker to worker. So nobody enters a reduction before all do, those who take different branches are
told instead of waiting for ever, and the run can be evaluated at any moment. One number or bit to agree
on travels with the meeting itself.

What has to begin before all have come (a started average, the buckets of a gradient) begins over all ranks.
Hence a worker that has finished stays, and takes part with nothing until all have finished.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.fabric.collective import Collective, GroupLine, Torn
from paceline.fabric.segment import Segment
from paceline.protocols.core.meeting import call_of
from paceline.protocols.core.operations import Average, Exchange, Handle, Mix
from paceline.protocols.core.parts import Part
from paceline.runtime.messages.workers import Carried, Joint, Meet, Met, Release, Show, Stand
from paceline.runtime.peer.collective.buckets import Buckets
from paceline.runtime.peer.collective.link import CollectiveLink
from paceline.runtime.peer.collective.slab import Slab, pack
from paceline.runtime.peer.optimizer import not_finite
from paceline.runtime.peer.state import PeerState
from paceline.runtime.worker.model.binding import Binding
from paceline.store.replicas import (
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    answer_bytes,
    answer_parts,
)
from paceline.store.vector import FlatVector

T = TypeVar("T")


class CollectiveCarrier:
    """One worker's, connected to the others."""

    _peer: PeerState
    _collective: Collective
    _slab: Slab

    def __init__(self, link: CollectiveLink) -> None:
        self._link = link
        link.obey = self._obey
        self._lanes = 0
        self._spare: list[Slab] = []
        self._started: dict[int, tuple[Slab, bool, Part | None, list[Any]]] = {}
        self._put_off: dict[int, tuple[Mix, FlatVector]] = {}
        """Started mixtures. Neighbours send to each other when both are there, which is when they wait."""
        self._on_show: Slab | None = None
        self._distance = 0.0
        self._buckets: Buckets | None = None

    # -- preparing ----------------------------------------------------------------------------

    def ground(self, binding: Binding) -> tuple[Tensor, Tensor]:
        """The memory where the model is, on whatever device."""
        self._binding = binding
        return binding.stay_near()

    def connect(self, peer: PeerState) -> None:
        """Find the others."""
        self._peer, link = peer, self._link
        self._collective = Collective(peer.me.rank, peer.me.size, link.meeting, link.look, self._device)
        self._slab = self._new_slab()
        if peer.protocol.overlaps and not peer.trainer.intake.several:
            gradients, fabric = self._binding.gradients, self._collective
            self._buckets = Buckets(
                peer.layout, gradients, peer.gradient, fabric, self._slab, self._expected_share
            )

    @property
    def _device(self) -> torch.device:
        return self._peer.gradient[0].device

    def _new_slab(self) -> Slab:
        buffers = self._peer.me.buffers
        assert isinstance(buffers, FlatVector)
        return self._spare.pop() if self._spare else Slab(self._peer.layout, buffers.parts, self._device)

    def _expected_share(self) -> float:
        """This gradient's share, if all the others come from full batches."""
        intake = self._peer.trainer.intake
        count = intake.weigh(0)
        known = count or intake.used  # a batch that counts for nothing has no samples
        return (count / intake.usual if known else 1.0) / self._peer.me.size

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What breaks off in here is explained by the run."""
        try:
            yield
        except Torn as error:
            raise self._link.torn(str(error)) from None

    # -- joint operations ---------------------------------------------------------------------

    def exchange(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        """Have the vectors travel, once all have come; a gradient may have left before, in buckets."""
        with self._whole():
            return self._exchange(operation, vector)

    def _exchange(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        place, part, peer = self._kind(vector), _part(operation), self._peer
        bucketed = self._bucketed(operation, place)
        carried = None
        if bucketed is not None:
            same = bucketed.send_rest()
            void = vector.norm == 0.0 or bucketed.blind
            carried = Carried(bucketed=True, changed=not same and not void, void=void)
        missing = tuple(sorted(vector.missing))
        call = call_of(_together(operation), peer.lane)
        met = self.meet(Meet(call, place, missing=missing, push=peer.told(), carried=carried))
        assert met.joint is not None
        if bucketed is None or not self._in_buckets(bucketed, met.joint):
            self._travel(operation, met.joint, vector, place == BUFFERS)
        self._slab.put_back(part)
        return self._checked(self._answer(self._slab, place == BUFFERS, met), place, part)

    def _bucketed(self, operation: Average | Mix, place: int) -> Buckets | None:
        """The buckets in which this very average is under way already."""
        whole = isinstance(operation, Average) and operation.group is None and operation.part is None
        ours = whole and place == GRADIENTS
        return self._buckets if ours and self._buckets is not None and self._buckets.on else None

    def _in_buckets(self, buckets: Buckets, joint: Joint) -> bool:
        """Whether what travelled in buckets has become the answer."""
        buckets.finish()
        if joint.changed:
            buckets.stop()
            if self._link.lead:
                self._link.say(
                    "gradients change between backward and step (accumulated, clipped or scaled there), so "
                    "they are averaged at the step from now on, not while backward goes on"
                )
        if joint.changed or joint.again:
            return False
        self._slab.scale(self._peer.me.size * self._peer.trainer.intake.usual / joint.total)
        return True

    def _travel(self, operation: Average | Mix, joint: Joint, vector: FlatVector, buffers: bool) -> None:
        """Have the answer in the slab."""
        slab, part = self._slab, _part(operation)
        if isinstance(operation, Mix):
            mine = self._flats(vector, buffers, None)
            self._collective.mix(mine, joint.row, joint.takers, slab.flats(buffers))
        elif joint.among:
            slab.fill(vector.parts, joint.row[self._link.rank], buffers, part)
            self._collective.reduce(slab.flats(buffers, part), joint.among)
        else:
            mine = self._flats(vector, buffers, part)
            self._collective.average(mine, joint.row, slab.flats(buffers, part))

    def _flats(self, vector: FlatVector, buffers: bool, part: Part | None) -> Sequence[Tensor]:
        """A vector as it travels between pairs: as it lies, but for what is many and small."""
        if not buffers and part is None:
            return vector.parts
        pieces = self._peer.cut.pieces(vector.parts, part)
        flats, views = pack(pieces)
        FlatVector(views)[:] = FlatVector(pieces)
        return flats

    def _answer(self, slab: Slab, buffers: bool, met: Met) -> FlatVector:
        return FlatVector(slab.parts(buffers), frozenset(met.missing))

    def _kind(self, vector: FlatVector) -> int:
        """What a vector is, or is like."""
        if vector.parts and vector.parts[0].data_ptr() == self._peer.gradient[0].data_ptr():
            return GRADIENTS
        return PARAMETERS if self._peer.like_parameters(vector) else BUFFERS

    def _checked(self, answer: FlatVector, place: int, part: Part | None) -> FlatVector:
        """Name the one whose gradient is not finite, if the mean is not."""
        if place != GRADIENTS:
            return answer
        answer.norm = self._peer.cut.length(answer, part)
        expected = self._peer.trainer.scaled or self._link.config.bad_gradient == "skip"
        if math.isfinite(answer.norm) or expected:
            return answer
        mine = self._binding.bad_parameter()
        if mine is not None:
            raise not_finite(self._link.rank, mine)
        raise self._link.torn("the mean of all gradients is not finite.")

    # -- what is started ----------------------------------------------------------------------

    def start(self, operation: Average | Mix | Exchange) -> Handle:
        """Send off a copy, over all who may come; the weights are made to add up to 1 in the end."""
        if isinstance(operation, Exchange):
            raise self._needs_cells(operation)
        with self._whole():
            return self._start(operation)

    def _start(self, operation: Average | Mix) -> Handle:
        vector = operation.vector
        assert isinstance(vector, FlatVector)
        if isinstance(operation, Mix):
            self._lanes += 1
            self._put_off[self._lanes] = operation, vector.clone()
            return Handle(self._lanes)
        if operation.weight <= 0 and vector.norm != 0.0:
            raise ConfigError(
                f"{type(self._peer.protocol).__name__} starts {call_of(operation)}: over gloo, only an "
                "average with a weight above 0 can be started. Use --fabric shared."
            )
        self._lanes += 1
        slab, place, part = self._new_slab(), self._kind(vector), operation.part
        buffers = place == BUFFERS
        slab.fill(vector.parts, operation.weight / self._peer.me.size, buffers, part)
        works = self._collective.begin(slab.flats(buffers, part), operation.group or (), GroupLine.STARTED)
        self._started[self._lanes] = slab, buffers, part, works
        missing = tuple(sorted(vector.missing))
        self.tell(Meet(call_of(operation, self._lanes), place, missing=missing))
        return Handle(self._lanes)

    def test(self, handle: Handle) -> Any:
        """This worker sees it by itself."""
        return all(work.is_completed() for work in self._started[handle.lane][-1])

    def now(self) -> float:
        """A clock of this worker's own, since such runs are not replayed."""
        return time.perf_counter()

    def wait(self, handle: Handle) -> FlatVector:
        """The sum is there, and what it is to be divided by."""
        with self._whole():
            mix = self._put_off.pop(handle.lane, None)
            return self._wait(handle) if mix is None else self._exchange(*mix)

    def _wait(self, handle: Handle) -> FlatVector:
        met = self.meet(Meet(wait=handle.lane, push=self._peer.told()))
        slab, buffers, part, works = self._started.pop(handle.lane)
        self._collective.finish(works)
        assert met.joint is not None
        slab.scale(self._peer.me.size / met.joint.total, buffers, part)
        slab.put_back(part)
        self._spare.append(slab)
        return self._answer(slab, buffers, met)

    def trade(self, operation: Exchange) -> FlatVector:
        """Nobody keeps cells here."""
        raise self._needs_cells(operation)

    def _needs_cells(self, operation: Exchange) -> ConfigError:
        return ConfigError(
            f"{type(self._peer.protocol).__name__} uses {type(operation).__name__}, an operation that only "
            "shared memory can carry out. Use --fabric shared."
        )

    # -- what is asked in between -------------------------------------------------------------

    def _obey(self, order: Stand | Show) -> None:
        if isinstance(order, Show):
            return self._show(order)
        if order.bucketed:
            assert self._buckets is not None
            self._buckets.stand()
        if order.plain:
            line = GroupLine.STARTED if order.lane > 0 else GroupLine.NOW
            self._slab.clear(order.buffers, order.part)
            self._collective.reduce(self._slab.flats(order.buffers, order.part), order.among, line)
        return None

    def _show(self, order: Show) -> None:
        """The mean of all models, and how far the replicas are from it."""
        me, model = self._peer.me, self._peer.protocol.model(self._peer.me)
        assert isinstance(model, FlatVector)
        assert isinstance(me.buffers, FlatVector)
        slab = self._on_show = self._on_show or self._new_slab()
        for vector, buffers in ((model, False), (me.buffers, True)):
            slab.fill(vector.parts, order.share, buffers)
            self._collective.reduce(slab.flats(buffers), (), GroupLine.MODEL)
        apart = me.parameters - FlatVector(slab.parts())
        mine = apart.dot(apart) if order.counts else 0.0
        square = torch.tensor([mine], dtype=torch.float64, device=self._device)
        self._collective.reduce([square], (), GroupLine.MODEL)
        self._distance = math.sqrt(float(square) / order.counted)
        if order.hand_over:
            self._hand_over(slab)

    def _hand_over(self, slab: Slab) -> None:
        """Give the mean to the run, which saves it."""
        memory = Segment.create(answer_bytes(self._peer.layout), "the mean of all models")
        for buffers, parts in enumerate(answer_parts(self._peer.layout, memory.bytes)):
            FlatVector(parts)[:] = FlatVector(slab.parts(bool(buffers)))
        self._link.begin(Meet(carried=Carried(mean=True)), (memory.fd,))
        memory.close_fd()

    # -- the mean of all models ---------------------------------------------------------------

    def mean(self) -> tuple[FlatVector, FlatVector]:
        """As it was shown to this worker."""
        slab = self._on_show
        assert slab is not None
        return FlatVector(slab.parts()), FlatVector(slab.parts(True))

    def distance(self, release: Release) -> float:
        """As the workers have measured it among themselves."""
        return self._distance

    def figures(self) -> dict[str, float]:
        """Only workers know it."""
        return {"consensus_distance": self._distance}

    # -- memory and words ---------------------------------------------------------------------

    def begins(self) -> None:
        """Nobody gets away from its neighbours."""

    def completed(self) -> None:
        """Everybody tells of itself when it is asked."""

    def keep(self, vector: Any) -> FlatVector:
        """Nobody else has to see it."""
        kept: FlatVector = vector.clone()
        return kept

    def memory_at(self, start: int) -> Tensor | None:
        """That of the answer to the last exchange."""
        return self._slab.memory if self._slab.memory.data_ptr() == start else None

    def cleared(self) -> None:
        """What has left in buckets is not the gradient any more."""
        if self._buckets is not None:
            self._buckets.spoil()

    def meet(self, message: Meet) -> Met:
        """Sleep until all have come."""
        return self._peer.heard(self._say(message, self._link.meet))

    def tell(self, message: Meet) -> None:
        """Go on."""
        self._say(message, self._link.begin)

    def _say(self, message: Meet, how: Callable[[Meet, tuple[int, ...]], T]) -> T:
        stage = self._peer.protocol.stage(self._peer.me)
        return how(msgspec.structs.replace(message, stage=stage), ())

    def leaving(self) -> bool:
        """The shared memory has the model; the others go on over all ranks, unless the run is over."""
        self._binding.hand_back()
        if self._link.halted:
            return False
        if not self._peer.protocol.settles:
            self.tell(Meet(retires=True))
        return True

    def close(self) -> None:
        """Disconnect."""
        self._collective.close()


def _together(operation: Average | Mix) -> Average | Mix:
    """Pairs exchange when both are there, so all who are connected wait for each other."""
    return replace(operation, ahead=None) if isinstance(operation, Mix) else operation


def _part(operation: Average | Mix) -> Part | None:
    return operation.part if isinstance(operation, Average) else None
