"""A worker among peers whose vectors travel by torch.distributed, from worker to worker.

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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.fabric.collective import Collective, GroupLine, Torn
from paceline.fabric.segment import Segment
from paceline.protocols.core.meeting import call_of
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Handle,
    Mix,
    Operation,
    Preview,
    Recall,
    Remember,
    Reset,
    Start,
    Step,
    Test,
    Wait,
)
from paceline.protocols.core.parts import Part
from paceline.protocols.core.peer import Done, Peer, settles
from paceline.runtime.messages.workers import Carried, Joint, Meet, Met, Show, Stand
from paceline.runtime.peer.collective.buckets import Buckets
from paceline.runtime.peer.collective.link import CollectiveLink
from paceline.runtime.peer.collective.slab import Slab, pack
from paceline.runtime.peer.worker import PeerWorker
from paceline.runtime.worker.paced import PacedWorker
from paceline.store.replicas import (
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    answer_bytes,
    answer_parts,
)
from paceline.store.vector import FlatVector

T = TypeVar("T")
CARRIED = (Step, Preview, Reset, Recall, Remember, Average, Mix, Agree, Start, Wait, Test, Done)
"""The operations that need nobody's memory but one's own."""


class CollectiveWorker(PeerWorker):
    """One of several workers, connected to the others."""

    def __init__(self, link: CollectiveLink, protocol: Peer) -> None:
        super().__init__(link, protocol)
        self._wire = link
        link.obey = self._obey
        self._spare: list[Slab] = []
        self._started: dict[int, tuple[Slab, bool, Part | None, list[Any]]] = {}
        self._on_show: Slab | None = None
        self._distance = 0.0
        self._buckets: Buckets | None = None

    def _ground(self) -> tuple[Tensor, Tensor]:
        self._near = self._binding.stay_near()
        return self._near

    def _all_buffers(self) -> list[Tensor]:
        return self._layout.buffer_views(self._near[0])

    def _connect(self) -> None:
        wire, device = self._wire, self._gradient[0].device
        self._collective = Collective(self.rank, self.size, wire.meeting, wire.look, device)
        self._slab = self._new_slab()
        self._answers = {False: self._slab.memory}
        if self._protocol.overlaps and len(self._since) == 1:
            gradients, fabric = self._binding.gradients, self._collective
            self._buckets = Buckets(
                self._layout, gradients, self._gradient, fabric, self._slab, self._expected_share
            )

    def _new_slab(self) -> Slab:
        buffers = self._me.buffers
        assert isinstance(buffers, FlatVector)
        return (
            self._spare.pop() if self._spare else Slab(self._layout, buffers.parts, self._gradient[0].device)
        )

    def _expected_share(self) -> float:
        """This gradient's share, if all the others come from full batches."""
        known = self._samples or self._used  # a batch that counts for nothing has no samples
        return (self._samples / self._usual if known else 1.0) / self.size

    # -- operations ---------------------------------------------------------------------------

    def _carry_out(self, operation: Operation | Done) -> Any:
        if not isinstance(operation, CARRIED):
            raise ConfigError(
                f"{type(self._protocol).__name__} uses {type(operation).__name__}, an operation that only "
                "shared memory can carry out. Use --fabric shared."
            )
        try:
            if isinstance(operation, Test):
                return all(work.is_completed() for work in self._started[operation.handle.lane][-1])
            return super()._carry_out(operation)
        except Torn as error:
            raise self._wire.torn(str(error)) from None

    def _exchange(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        place, part = self._kind(vector), _part(operation)
        bucketed = self._bucketed(operation, place)
        carried = None
        if bucketed is not None:
            same = bucketed.send_rest()
            void = vector.norm == 0.0 or bucketed.blind
            carried = Carried(bucketed=True, changed=not same and not void, void=void)
        missing = tuple(sorted(vector.missing))
        call = call_of(operation, self._lane)
        met = self._meet(Meet(call, place, missing=missing, push=self._told(), carried=carried))
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
            if self.lead:
                self._warn(
                    "gradients change between backward and step (accumulated, clipped or scaled there), so "
                    "they are averaged at the step from now on, not while backward goes on"
                )
        if joint.changed or joint.again:
            return False
        self._slab.scale(self.size * self._usual / joint.total)
        return True

    def _travel(self, operation: Average | Mix, joint: Joint, vector: FlatVector, buffers: bool) -> None:
        """Have the answer in the slab."""
        slab, part = self._slab, _part(operation)
        if isinstance(operation, Mix):
            mine = self._flats(vector, buffers, None)
            self._collective.mix(mine, joint.row, joint.takers, slab.flats(buffers))
        elif joint.among:
            slab.fill(vector.parts, joint.row[self.rank], buffers, part)
            self._collective.reduce(slab.flats(buffers, part), joint.among)
        else:
            mine = self._flats(vector, buffers, part)
            self._collective.average(mine, joint.row, slab.flats(buffers, part))

    def _flats(self, vector: FlatVector, buffers: bool, part: Part | None) -> Sequence[Tensor]:
        """A vector as it travels between pairs: as it lies, but for what is many and small."""
        if not buffers and part is None:
            return vector.parts
        pieces = self._cut.pieces(vector.parts, part)
        flats, views = pack(pieces)
        FlatVector(views)[:] = FlatVector(pieces)
        return flats

    def _answer(self, slab: Slab, buffers: bool, met: Met) -> FlatVector:
        return FlatVector(slab.parts(buffers), frozenset(met.missing))

    def _kind(self, vector: FlatVector) -> int:
        """What a vector is, or is like."""
        if vector.parts and vector.parts[0].data_ptr() == self._gradient[0].data_ptr():
            return GRADIENTS
        return PARAMETERS if self._like_parameters(vector) else BUFFERS

    def _checked(self, answer: FlatVector, place: int, part: Part | None) -> FlatVector:
        """Name the one whose gradient is not finite, if the mean is not."""
        if place != GRADIENTS:
            return answer
        answer.norm = self._cut.length(answer, part)
        if math.isfinite(answer.norm) or self._scaled or self._link.config.bad_gradient == "skip":
            return answer
        if self._binding.bad_parameter() is not None:
            self._refuse()
        raise self._wire.torn("the mean of all gradients is not finite.")

    # -- what is started ----------------------------------------------------------------------

    def _start(self, operation: Average | Mix) -> Handle:
        """Send off a copy, over all who may come; the weights are made to add up to 1 in the end."""
        vector = operation.vector
        assert isinstance(vector, FlatVector)
        if isinstance(operation, Mix) or (operation.weight <= 0 and vector.norm != 0.0):
            raise ConfigError(
                f"{type(self._protocol).__name__} starts {call_of(operation)}: over gloo, only an average "
                "with a weight above 0 can be started. Use --fabric shared."
            )
        self._lanes += 1
        slab, place, part = self._new_slab(), self._kind(vector), operation.part
        buffers = place == BUFFERS
        slab.fill(vector.parts, operation.weight / self.size, buffers, part)
        works = self._collective.begin(slab.flats(buffers, part), operation.group or (), GroupLine.STARTED)
        self._started[self._lanes] = slab, buffers, part, works
        missing = tuple(sorted(vector.missing))
        self._say(Meet(call_of(operation, self._lanes), place, missing=missing), self._link.begin)
        return Handle(self._lanes)

    def _wait(self, handle: Handle) -> FlatVector:
        met = self._meet(Meet(wait=handle.lane, push=self._told()))
        slab, buffers, part, works = self._started.pop(handle.lane)
        self._collective.finish(works)
        assert met.joint is not None
        slab.scale(self.size / met.joint.total, buffers, part)
        slab.put_back(part)
        self._spare.append(slab)
        return self._answer(slab, buffers, met)

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
        me, model = self._me, self._protocol.model(self._me)
        assert isinstance(model, FlatVector)
        assert isinstance(me.buffers, FlatVector)
        slab = self._on_show = self._on_show or self._new_slab()
        for vector, buffers in ((model, False), (me.buffers, True)):
            slab.fill(vector.parts, order.share, buffers)
            self._collective.reduce(slab.flats(buffers), (), GroupLine.MODEL)
        apart = me.parameters - FlatVector(slab.parts())
        mine = apart.dot(apart) if order.counts else 0.0
        square = torch.tensor([mine], dtype=torch.float64, device=self._gradient[0].device)
        self._collective.reduce([square], (), GroupLine.MODEL)
        self._distance = math.sqrt(float(square) / order.counted)
        if order.hand_over:
            self._hand_over(slab)

    def _hand_over(self, slab: Slab) -> None:
        """Give the mean to the run, which saves it."""
        memory = Segment.create(answer_bytes(self._layout), "the mean of all models")
        for buffers, parts in enumerate(answer_parts(self._layout, memory.bytes)):
            FlatVector(parts)[:] = FlatVector(slab.parts(bool(buffers)))
        self._link.begin(Meet(carried=Carried(mean=True)), (memory.fd,))
        memory.close_fd()

    # -- instead of shared memory -------------------------------------------------------------

    def _say(self, message: Meet, how: Callable[[Meet, tuple[int, ...]], T]) -> T:
        return how(msgspec.structs.replace(message, stage=self._protocol.stage(self._me)), ())

    def _keep(self, vector: Any) -> FlatVector:
        kept: FlatVector = vector.clone()
        return kept

    def _zero_grad(self, which: int, set_to_none: bool = True) -> None:
        if self._buckets is not None:
            self._buckets.spoil()
        super()._zero_grad(which, set_to_none)

    def _found(self) -> tuple[FlatVector, FlatVector]:
        """The mean of all models, which was taken while this worker slept."""
        slab = self._on_show
        assert slab is not None
        return FlatVector(slab.parts()), FlatVector(slab.parts(True))

    def _apart(self) -> float:
        self._link.away(distance=True)
        self.report(consensus_distance=self._distance)
        return self._distance

    def _back(self, values: dict[str, float], seconds: float) -> None:
        super()._back(values | {"consensus_distance": self._distance}, seconds)

    def _leave(self) -> None:
        if self._model is not None:
            self._binding.hand_back()
        if self._model is None or self._wire.halted:
            return PacedWorker._leave(self)
        if not settles(self._protocol):
            self._say(Meet(retires=True), self._link.begin)
        super()._leave()
        self._collective.close()
        return None


def _part(operation: Average | Mix) -> Part | None:
    return operation.part if isinstance(operation, Average) else None
