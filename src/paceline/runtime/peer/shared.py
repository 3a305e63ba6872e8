"""Carries vectors through shared memory: the meeting place reads them where they lie, and answers there.

Parameters, gradients and buffers lie in memory that the meeting place reads, so giving a vector away copies
nothing; only what a protocol has computed itself is copied there first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from torch import Tensor

from paceline.errors import RunError
from paceline.protocols.core.meeting import call_of
from paceline.protocols.core.operations import Average, Exchange, Handle, Mix
from paceline.protocols.rules.compression import parse_compression
from paceline.runtime.messages.workers import Meet, Met, Release, Trade
from paceline.runtime.peer.compression import Packed, Packing
from paceline.runtime.peer.kept_copies import KeptCopies
from paceline.runtime.peer.memory import Halves, PeerMemory
from paceline.runtime.peer.state import PeerState
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.model.binding import Binding
from paceline.store.compression.codecs import matrices
from paceline.store.replicas import GRADIENTS, PARAMETERS, answer_parts, is_buffers
from paceline.store.vector import FlatVector

T = TypeVar("T")


class SharedCarrier:
    """One worker's."""

    _peer: PeerState
    _memories: PeerMemory
    _packing: Packing
    _copies: KeptCopies

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self._answers: dict[bool, Tensor] = {}
        """Where answers lie: those for all, and those for this worker."""
        self._lanes = 0
        self._free: list[tuple[Halves, Halves]] = []
        self._under_way: dict[int, tuple[Callable[[], None], FlatVector, Packed | None]] = {}
        """How to give the memory back that was used, where the answer goes, what was compressed of it."""
        self._backs: list[Halves] = []
        """Room for answers to started mixtures."""
        self._was: FlatVector | None = None
        """What this worker was when its iteration began; None: it has not begun."""

    # -- preparing ----------------------------------------------------------------------------

    def ground(self, binding: Binding) -> tuple[Tensor, Tensor]:
        """The segments that it was given."""
        binding.require_cpu(
            "peers that share memory train models on the CPU only, so far. Use --fabric gloo, which takes "
            "NCCL for such a model, or a paced protocol, such as bsp."
        )
        segment, weights, *_ = self._link.segments
        return segment.bytes, weights.bytes

    def connect(self, peer: PeerState) -> None:
        """Know what lies where."""
        self._peer, me, config = peer, peer.me, self._link.config
        answers = (each.bytes for each in self._link.segments[2:])
        self._answers = dict(zip((True, False), answers, strict=False))
        self._memories = PeerMemory(peer.layout, me.rank)
        self._copies = KeptCopies(self._memories)
        assert isinstance(me.parameters, FlatVector)
        assert isinstance(me.buffers, FlatVector)
        for place, parts in enumerate((me.parameters.parts, peer.gradient, me.buffers.parts)):
            self._memories.know(parts, place)
        how = parse_compression(config.compress)
        found, wired = matrices(peer.layout, int(how.amount or 0)), config.listen is not None
        self._packing = Packing(how, me, found, wired=wired)

    # -- joint operations ---------------------------------------------------------------------

    def exchange(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        """Give it away where it lies, and read the answer."""
        if self._peer.trainer.shared:
            return self._in_unison(operation, vector)
        packed = self._packing.pack(operation)
        call, size = call_of(operation, self._peer.lane, packed.size_bytes), packed.written_bytes(operation)
        if isinstance(operation, Mix) and operation.ahead is not None:
            place = self._memories.at(self._lasting(operation, packed))
        elif size:
            place = self._memories.at(self._memories.scratch(like_parameters=True))
            self._memories.write(packed.pieces, place)
        else:
            place = self._memories.place(packed.vector, self._peer.like_parameters)
        missing = tuple(sorted(vector.missing))
        met = self.meet(Meet(call, place, missing=missing, push=self._peer.told(), packed=size))
        answer = answer_parts(self._peer.layout, self._answers[met.shared])[is_buffers(place)]
        return packed.opened(_answered(answer, met))

    def _in_unison(self, operation: Average | Mix, vector: FlatVector) -> FlatVector:
        """The run averages and steps for all. Nobody else has to see the mean, and it may take the place of
        gradients in a script that clears them after every step."""
        missing, call = tuple(sorted(vector.missing)), call_of(operation, self._peer.lane)
        met = self.meet(Meet(call, GRADIENTS, missing=missing, push=self._peer.told()))
        return _answered(vector.parts, met)

    def start(self, operation: Average | Mix | Exchange) -> Handle:
        """Send off a copy, so that the worker may go on; the answer gets memory of its own."""
        if isinstance(operation, Exchange):
            return self._start_trade(operation)
        if isinstance(operation, Mix) and operation.ahead is not None:
            return self._start_mixing(operation)
        vector, self._lanes, lend = operation.vector, self._lanes + 1, self._memories.lend
        assert isinstance(vector, FlatVector)
        slot = self._free.pop() if self._free else (lend("what is sent off"), lend("answers"))
        half = not self._peer.like_parameters(vector)
        there, back = slot[0][half], slot[1][half]
        packed = self._packing.pack(operation)
        place, into = (self._memories.at(each) for each in (there, back))
        size = packed.written_bytes(operation)
        if size:
            self._memories.write(packed.pieces, place)
        else:
            part = operation.part if isinstance(operation, Average) else None
            self._peer.cut.copy(packed.vector, there, part)
        missing = tuple(sorted(vector.missing))
        call = call_of(operation, self._lanes, packed.size_bytes)
        self.tell(Meet(call, place, into, missing=missing, packed=size))
        self._under_way[self._lanes] = partial(self._free.append, slot), back, packed
        return Handle(self._lanes)

    def test(self, handle: Handle) -> Any:
        """The meeting place knows."""
        return self.meet(Meet(wait=handle.lane, test=True)).outcome

    def now(self) -> float:
        """The meeting place has the clock, whichever it is."""
        return float(self.meet(Meet(clock=True)).outcome or 0.0)

    def wait(self, handle: Handle) -> FlatVector:
        """The answer lies in the memory that was lent for it."""
        met = self.meet(Meet(wait=handle.lane, push=self._peer.told()))
        give_back, back, packed = self._under_way.pop(handle.lane)
        give_back()
        answer = _answered(back.parts, met)
        return answer if packed is None else packed.opened(answer)

    def _start_trade(self, operation: Exchange) -> Handle:
        """The same for an exchange that nobody else has to come to."""
        vector, self._lanes, lend = operation.vector, self._lanes + 1, self._memories.lend
        assert isinstance(vector, FlatVector)
        slot = self._free.pop() if self._free else (lend("what is sent off"), lend("answers"))
        half = not self._peer.like_parameters(vector)
        there, back = slot[0][half], slot[1][half]
        there[:] = vector
        trade = Trade(operation.rule, operation.cell, operation.other, operation.rate, self._lanes)
        self.tell(Meet(trade=trade, place=self._memories.at(there), into=self._memories.at(back)))
        self._under_way[self._lanes] = partial(self._free.append, slot), back, None
        return Handle(self._lanes)

    # -- workers that are apart ---------------------------------------------------------------

    def _start_mixing(self, operation: Mix) -> Handle:
        """What is sent off lasts until all have taken of it."""
        self._lanes += 1
        packed, vector = self._packing.pack(operation), operation.vector
        assert isinstance(vector, FlatVector)
        half = not self._peer.like_parameters(vector)
        backs = self._backs.pop() if self._backs else self._memories.lend("mixtures")
        sent = self._lasting(operation, packed)
        place, into = self._memories.at(sent), self._memories.at(backs[half])
        call, size = call_of(operation, self._lanes, packed.size_bytes), packed.written_bytes(operation)
        self.tell(Meet(call, place, into, missing=tuple(sorted(vector.missing)), packed=size))
        self._under_way[self._lanes] = partial(self._backs.append, backs), backs[half], packed
        return Handle(self._lanes)

    def _lasting(self, operation: Mix, packed: Packed) -> FlatVector:
        """A copy of what is brought, that lasts until all have taken of it."""
        peer, vector = self._peer, packed.vector
        if not peer.protocol.apart:
            raise RunError(f"{type(peer.protocol).__name__} mixes with `ahead`, but says it is not `apart`.")
        size = packed.written_bytes(operation)
        if (
            self._was is None
            and vector is peer.me.parameters
            and operation.step == peer.me.count
            and not size
        ):
            return self.begins()  # this worker as it is now, and nothing else
        room = self._copies.room(operation.step, peer.oldest)[not peer.like_parameters(vector)]
        if size:
            self._memories.write(packed.pieces, self._memories.at(room))
        else:
            room[:] = vector
        return room

    def begins(self) -> FlatVector:
        """Keep a copy, unless there is one that was sent off."""
        if self._was is None:
            me = self._peer.me
            parameters, buffers = self._copies.room(me.count, self._peer.oldest)
            assert isinstance(me.parameters, FlatVector)
            assert isinstance(me.buffers, FlatVector)
            parameters[:], buffers[:] = me.parameters, me.buffers
            self._was = parameters
        return self._was

    def completed(self) -> None:
        """Until the next iteration begins, this worker lies still."""
        self._was = None
        self.tell(Meet(stands=True))

    def trade(self, operation: Exchange) -> FlatVector:
        """The meeting place carries it out alone."""
        vector = operation.vector
        assert isinstance(vector, FlatVector)
        trade = Trade(operation.rule, operation.cell, operation.other, operation.rate)
        place = self._memories.place(vector, self._peer.like_parameters)
        met = self.meet(Meet(trade=trade, place=place, push=self._peer.told()))
        return _answered(answer_parts(self._peer.layout, self._answers[False])[is_buffers(place)], met)

    # -- memory -------------------------------------------------------------------------------

    def keep(self, vector: Any) -> FlatVector:
        """In memory that is lent for it."""
        kept = self._memories.lend("a protocol")[not self._peer.like_parameters(vector)]
        kept[:] = vector
        return kept

    def memory_at(self, start: int) -> Tensor | None:
        """What it was given for answers, or lent."""
        memory = next((each for each in self._answers.values() if each.data_ptr() == start), None)
        return self._memories.lent_at(start) if memory is None else memory

    def cleared(self) -> None:
        """Nothing has left yet."""

    def mean(self) -> tuple[FlatVector, FlatVector]:
        """It lies where answers for this worker do."""
        mean = answer_parts(self._peer.layout, self._answers[False])
        return FlatVector(mean[0]), FlatVector(mean[1])

    def distance(self, release: Release) -> float:
        """As the run has measured it."""
        assert release.distance is not None
        return release.distance

    def figures(self) -> dict[str, float]:
        """The run knows all of it."""
        return {}

    # -- words --------------------------------------------------------------------------------

    def meet(self, message: Meet) -> Met:
        """Sleep until it is carried out."""
        return self._peer.heard(self._say(message, self._link.meet))

    def tell(self, message: Meet) -> None:
        """Go on."""
        self._say(message, self._link.begin)

    def _say(self, message: Meet, how: Callable[[Meet, tuple[int, ...]], T]) -> T:
        """Tell it to the meeting place, with memory that is lent from now on, and what stands for us."""
        fds, protocol, me = self._memories.unsent(), self._peer.protocol, self._peer.me
        cell, stage = protocol.cell(me), protocol.stage(me)
        stood = PARAMETERS if self._was is None else self._memories.at(self._was)
        where = {"model": self._model_place(), "cell": cell, "stage": stage, "stood": stood}
        message = msgspec.structs.replace(message, **where)
        told = how(message, tuple(each.fd for each in fds))
        for each in fds:
            each.close_fd()
        return told

    def _model_place(self) -> int:
        protocol = self._peer.protocol
        model = protocol.model(self._peer.me)
        assert isinstance(model, FlatVector)
        place = self._memories.find(model)
        if place is None:
            raise RunError(
                f"{type(protocol).__name__}.model() gave a vector that the run cannot see. "
                "Give parameters, or what me.keep() made."
            )
        return place

    def leaving(self) -> bool:
        """What it has given away lies still."""
        return True

    def close(self) -> None:
        """Memory goes with the process."""


def _answered(parts: Sequence[Tensor], met: Met) -> FlatVector:
    answer = FlatVector(parts, frozenset(met.missing))
    answer.norm = met.norm
    return answer
