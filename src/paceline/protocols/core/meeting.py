"""Where peers meet: who has come to which joint operation, and which of them can be carried out.

Pure bookkeeping, shared by everything that runs peer protocols: it is told who arrives with what,
who joins and who leaves, and answers what is complete. Somebody who came and then died still
counts with what it brought; somebody who did not come is not waited for. There is one such place
per run, so all who take part in an operation see it carried out with the same members, or not at all.

Mixing is carried out for one worker at a time, as soon as its neighbours have come (`mixing.py`): what it
brought may be needed by others long after it has gone on.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.errors import RunError
from paceline.protocols.core.mixing import Mixings, Ready
from paceline.protocols.core.operations import Agree, Average, How, Joint, Mix
from paceline.protocols.core.parts import Part
from paceline.protocols.core.topology import Rows, Topology

Kind = Literal["average", "mix", "agree"]
VOTE_BYTES = 8
"""Bytes of what one worker has to say when all agree."""


Turn = tuple[int, int, int]
"""Lane, step, and size of the vectors."""


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A joint operation, without the vector that goes into it."""

    kind: Kind
    group: tuple[int, ...] | None = None
    weight: float = 1.0
    value: float = 0.0
    how: How | None = None
    topology: Topology | None = None
    step: int = 0
    ahead: int | None = None
    """How many steps one may be ahead of the slowest; None: all who are connected wait for each other."""
    part: Part | None = None
    """Which of the model's tensors; None: all."""
    size_bytes: int = 0
    """Bytes of the vector; all have to bring the same."""
    sent_bytes: int = 0
    """What it comes to on the wire."""
    lane: int = 0
    """0: its worker sleeps meanwhile. Above, it goes on, and this counts the operations it has started.
    `SETTLING`: it sleeps, after its last iteration."""

    @property
    def given_bytes(self) -> int:
        """What its worker gives away, a vote included."""
        return VOTE_BYTES if self.kind == "agree" else self.sent_bytes

    @property
    def turn(self) -> Turn:
        """Which of those it is that its worker may be in at once."""
        return self.lane, self.step, self.size_bytes

    @property
    def signature(self) -> tuple[object, ...]:
        """What has to be the same for all who take part."""
        same = self.kind, self.group, self.how, self.topology, self.step, self.ahead
        return *same, self.part, self.size_bytes, self.lane

    def __str__(self) -> str:
        among = "" if self.group is None else f" among {list(self.group)}"
        size = "" if self.kind == "agree" else f" of {self.size_bytes} bytes"
        size += "" if self.part is None else f" in {len(self.part.tensors)} tensors"
        step = f" of step {self.step}" if self.kind == "mix" else ""
        return f"{self.kind.capitalize()}{among}{size}{step}"


class Gathered(msgspec.Struct, frozen=True):
    """A joint operation that everybody it needs has come to."""

    kind: Kind
    receivers: tuple[int, ...]
    """Who waits for the answer, by rank."""
    rows: Rows
    """Per receiver, whose vectors it gets and their shares, by rank. Of an average all rows are one."""
    outcome: float | bool | None = None
    """What was agreed on."""
    lane: int = 0
    size_bytes: int = 0
    """Of each vector."""
    sent_bytes: int = 0
    """What each gave away of it."""
    part: Part | None = None
    """Which of the model's tensors; None: all."""
    step: int = 0
    """Of a mixture."""
    takers: tuple[int, ...] = ()
    """Of a mixture: who takes what its receiver has brought."""
    messages: dict[int, int] = {}
    """Of a mixture: how many vectors each of those sends or gets whose values go into it."""
    last: bool = True
    """Whether nobody needs any more what was brought to it."""

    @property
    def turn(self) -> Turn:
        """Which of those it is that its workers may be in at once."""
        return self.lane, self.step, self.size_bytes

    @property
    def given_bytes(self) -> int:
        """What each gave away, votes included."""
        return VOTE_BYTES if self.kind == "agree" else self.sent_bytes

    @property
    def answer_bytes(self) -> int | None:
        """What each gets, if not as much. An average of compressed vectors is no such vector: either those of
        the others come, or it comes whole, whichever is less. A mixture comes whole."""
        if self.kind == "agree" or self.sent_bytes == self.size_bytes:
            return None
        others = len(self.rows[self.receivers[0]]) - 1
        return min(self.size_bytes, others * self.sent_bytes) if self.kind == "average" else self.size_bytes


def call_of(operation: Joint, lane: int = 0, sent_bytes: int | None = None) -> Call:
    """A joint operation as data; its vector may come to fewer bytes on the wire than it has."""
    size = 0 if isinstance(operation, Agree) else operation.size_bytes
    sent = size if sent_bytes is None else sent_bytes
    if isinstance(operation, Mix):
        mixing = Call("mix", topology=operation.topology, step=operation.step, ahead=operation.ahead)
        return msgspec.structs.replace(mixing, size_bytes=size, sent_bytes=sent, lane=lane)
    group = None if operation.group is None else tuple(sorted(operation.group))
    if isinstance(operation, Agree):
        return Call("agree", group, value=float(operation.value), how=operation.how, lane=lane)
    assert isinstance(operation, Average)
    part, weight = operation.part, operation.weight
    return Call("average", group, weight, part=part, size_bytes=size, sent_bytes=sent, lane=lane)


Signature = tuple[object, ...]
SETTLING = -1
"""The lane of those who have done their last iteration."""


class Meeting:
    """One per run."""

    def __init__(self) -> None:
        self._active: set[int] = set()
        self._retired: set[int] = set()
        self._calls: dict[Signature, dict[int, Call]] = {}
        self._asleep: dict[int, Signature] = {}
        self._mixings = Mixings()

    @property
    def active(self) -> tuple[int, ...]:
        """Who takes part, by rank."""
        return tuple(sorted(self._active))

    def join(self, rank: int) -> None:
        """A worker takes part from now on."""
        self._active.add(rank)
        self._mixings.join(rank)

    def retire(self, rank: int) -> list[Gathered]:
        """A worker has done its last iteration: nobody waits for it any more, but those who have, too."""
        self._retired.add(rank)
        return self._without(rank)

    def leave(self, rank: int) -> list[Gathered]:
        """A worker takes part no longer; who waited for it need not wait any more."""
        self._retired.discard(rank)
        return self._without(rank)

    def _without(self, rank: int) -> list[Gathered]:
        self._active.discard(rank)
        self._asleep.pop(rank, None)
        done = self._mix(self._mixings.leave(rank))
        self._calls = {k: calls for k, calls in self._calls.items() if k[0] != "mix" or k in self._mixings}
        for signature in [each for each in self._calls if each[0] != "mix"]:
            for waiting in sorted(self._calls.get(signature, {}).keys() & (self._active | self._retired)):
                done += self._complete(signature, waiting)
        if not done and self._active:
            self._check(min(self._active))
        return done

    def arrive(self, rank: int, call: Call) -> list[Gathered]:
        """A worker has come. On lane 0 it sleeps until its operation is carried out."""
        signature = call.signature
        self._calls.setdefault(signature, {})[rank] = call
        if call.lane == 0:
            self._asleep[rank] = signature
        if call.topology is None:
            done = self._complete(signature, rank)
        else:
            done = self._mix(self._mixings.arrive(rank, signature, call.topology, call.step, call.ahead))
        if not done and call.lane == 0:
            self._check(rank)
        return done

    def missing(self, rank: int, lane: int = 0) -> list[int] | None:
        """Whom a worker waits for that sleeps in an operation, on a lane; None: it is in none."""
        mine = (each for each, calls in self._calls.items() if rank in calls and calls[rank].lane == lane)
        signature = self._asleep.get(rank) if lane == 0 else next(mine, None)
        if signature is None:
            return None
        here = self._calls[signature]
        if here[rank].topology is not None:
            return self._mixings[signature].missing(rank)
        return sorted(self._needed(here[rank], rank) - here.keys())

    def _complete(self, signature: Signature, rank: int) -> list[Gathered]:
        here = self._calls.get(signature, {})
        if rank not in here:
            return []
        call = here[rank]
        if call.lane >= 0 and call.group is None and len(here) < len(self._active):
            return []
        needed = self._needed(call, rank)
        return [self._carry_out(signature, call, needed)] if needed <= here.keys() else []

    def _needed(self, call: Call, rank: int) -> frozenset[int]:
        """Whom a worker that has come waits for, itself included."""
        there = self._active if call.lane >= 0 else self._active | self._retired
        return frozenset((there if call.group is None else there.intersection(call.group)) | {rank})

    def _carry_out(self, signature: Signature, call: Call, needed: frozenset[int]) -> Gathered:
        here = self._calls.pop(signature)
        # whoever started it and has retired since is waiting for it, too
        receivers = tuple(sorted(needed | (here.keys() & (self._active | self._retired))))
        calls = dict(sorted(here.items()))
        if call.lane == 0:
            for rank in receivers:
                self._asleep.pop(rank, None)
        rows = dict.fromkeys(receivers, _shares({rank: each.weight for rank, each in calls.items()}))
        outcome = None if call.how is None else _agreed(call.how, [each.value for each in calls.values()])
        sizes = call.size_bytes, call.sent_bytes
        return Gathered(call.kind, receivers, rows, outcome, call.lane, *sizes, call.part)

    def _mix(self, ready: list[Ready]) -> list[Gathered]:
        """Answer those whose neighbours have come."""
        done = []
        for signature, rank in ready:
            assert isinstance(signature, tuple)
            step, call = self._mixings[signature], self._calls[signature].pop(rank)
            row = dict(sorted(step.rows[rank].items()))
            takers, messages = step.takers(rank), {source: step.messages(source) for source in row}
            if call.lane == 0:
                self._asleep.pop(rank, None)
            last = self._mixings.done(signature, rank)
            if last:
                del self._calls[signature]
            sizes = call.size_bytes, call.sent_bytes
            mixed = Gathered("mix", (rank,), {rank: row}, None, call.lane, *sizes)
            told = {"step": call.step, "takers": takers, "messages": messages, "last": last}
            done.append(msgspec.structs.replace(mixed, **told))
        return done

    # -- mistakes -----------------------------------------------------------------------------

    def _check(self, rank: int) -> None:
        """If all sleep and nothing was carried out, all would sleep for ever."""
        if len(self._asleep) < len(self._active):
            return
        asleep = {other: self._calls[self._asleep[other]][other] for other in sorted(self._asleep)}
        mine = asleep[rank]
        other = next((r for r, call in asleep.items() if call.signature != mine.signature), rank)
        raise RunError(
            f"rank {rank} is in {mine}, rank {other} in {asleep[other]}, and all wait for each other. "
            "Workers of a protocol have to take the same branch: let them Agree on it first."
        )


def _shares(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    if total <= 0:
        return {rank: 1.0 / len(weights) for rank in weights}
    return {rank: weight / total for rank, weight in weights.items()}


def _agreed(how: How, values: list[float]) -> float | bool:
    match how:
        case How.ANY:
            return any(values)
        case How.ALL:
            return all(values)
        case How.SUM:
            return sum(values)
        case How.MIN:
            return min(values)
        case How.MAX:
            return max(values)
