"""What became of a job of which a worker was killed, read from its traces and its processes.

Traces have clocks of their own, so *stood still* is taken from the traces alone: after the last step of
the one that was killed, the longest time between two steps of another worker, less what was usual before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from paceline.trace import TraceTail
from paceline.trace.events import AnyEvent, Decided

UNDER_WAY = 3
"""Steps after which it is certain that a worker has gone on."""


class Killed(msgspec.Struct, frozen=True):
    """How a job ended of which a worker was killed."""

    finished: bool
    """Whether the others did all that was theirs to do, and ended well."""
    went_on: bool
    """Whether anybody made a step after the kill."""
    still_s: float
    """How long the others stood still; where none went on, how long it took them to end."""
    ended: bool
    """Whether all ended by themselves; otherwise they were ended after waiting in vain."""
    statuses: dict[str, int | None]
    """Exit statuses by process; None: it had to be ended."""
    planned: int
    """Samples of the whole job."""
    applied: int
    """Samples behind the last weights."""
    computed: int
    """Samples that somebody computed a gradient of, some of them twice after a restart."""
    words: str = ""
    """The last that was said on the first host, where the job did not finish."""

    @property
    def lost(self) -> int:
        """Samples that the last weights have not seen."""
        return max(0, self.planned - self.applied)

    @property
    def repeated(self) -> int:
        """Samples that were computed for nothing."""
        return max(0, self.computed - self.applied)


class TracedStep(msgspec.Struct, frozen=True):
    """A worker's, as its trace has it."""

    t: float
    rank: int
    clock: int
    samples: int
    counts: bool


def steps_of(path: Path) -> list[TracedStep]:
    """All steps in a trace; none if there is no such file."""
    return (
        [] if not path.exists() else [step for event in TraceTail(path).new_events() for step in _step(event)]
    )


def _step(event: AnyEvent) -> list[TracedStep]:
    if not isinstance(event, Decided) or event.pushed is None:
        return []
    return [TracedStep(event.t, event.pushed, event.clock, event.samples, event.fate not in ("drop", "skip"))]


def stood_still_s(attempts: Sequence[Sequence[TracedStep]], victim: int) -> float | None:
    """How long somebody stood still, of those that went on; None: nobody did.

    A step that was under way when the victim died is no sign of going on, nor is the one before it, which may
    come later than the victim's own: whoever has gone on has made three.
    """
    last = max((step.t for step in attempts[0] if step.rank == victim), default=None)  # it may come back
    steps = [step for attempt in attempts for step in attempt]
    if last is None:
        return None
    ranks = {step.rank for step in steps} - {victim}
    found = [_longest(sorted(step.t for step in steps if step.rank == rank), last) for rank in ranks]
    return max((each for each in found if each is not None), default=None)


def _longest(times: list[float], last: float) -> float | None:
    """The longest time between two steps after a moment, less what was usual before it."""
    before, after = [t for t in times if t <= last], [t for t in times if t > last]
    if len(after) < UNDER_WAY:
        return None
    usual = median([b - a for a, b in pairwise(before)] or [0.0])
    return max(0.0, max(b - a for a, b in pairwise([*before[-1:], *after])) - usual)


def applied(attempts: Sequence[Sequence[TracedStep]], batch: int) -> int:
    """Samples behind the last weights: every rank's steps, by the last attempt in which anybody made one."""
    made = [steps for steps in attempts if steps]
    if not made:
        return 0
    if len(made) == 1:
        return sum(step.samples for step in made[0] if step.counts)
    furthest: dict[int, int] = {}
    for step in made[-1]:
        furthest[step.rank] = max(furthest.get(step.rank, 0), step.clock)
    return sum(furthest.values()) * batch
