"""Who waits for whom at this moment, as the store tells it on request: `why.json` in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

REQUEST, ANSWER, NOTICES = "why.ask", "why.json", "logs/notices.log"


class WorkerNow(msgspec.Struct, frozen=True):
    """One worker that takes part."""

    rank: int
    pid: int
    here: bool
    """Whether it is on the store's own host."""
    state: str
    """preparing, computing, evaluating or waiting."""
    call: str
    """The call of Paceline's that it is in; if it is in none, the last one it was in."""
    since_s: float
    """How long it has been so: since its last word, or since it was last answered."""
    iteration: int
    waits_for: tuple[int, ...] = ()


class RunNow(msgspec.Struct, frozen=True):
    """All of them."""

    seconds: float
    """Since training began; 0 before."""
    begun: bool
    workers: tuple[WorkerNow, ...]


def write_now(folder: Path, now: RunNow) -> None:
    """Answer a request, all at once."""
    made = folder / f"{ANSWER}.new"
    made.write_bytes(msgspec.json.encode(now))
    made.replace(folder / ANSWER)


def names(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2 and 3`."""
    told = [str(rank) for rank in sorted(ranks)]
    if len(told) == 1:
        return f"rank {told[0]}"
    return f"ranks {', '.join(told[:-1])} and {told[-1]}" if told else "nobody"


def waiting_words(ranks: Iterable[int]) -> str:
    """Who waits for somebody, as half a sentence."""
    there = tuple(ranks)
    if not there:
        return "no worker waits for it yet"
    return f"{names(there)} {'waits' if len(there) == 1 else 'wait'} for it"
