"""Results kept line by line as JSON, so that a long benchmark can be interrupted and go on later."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from paceline.decoding import decode_json
from paceline.errors import ConfigError, Undecodable

Kept = TypeVar("Kept")
Job = TypeVar("Job", bound=Hashable)
JobOf = TypeVar("JobOf", covariant=True)


class EndedJob(Protocol[JobOf]):
    """What became of a run."""

    @property
    def job(self) -> JobOf:
        """Which run it was."""
        ...

    @property
    def trouble(self) -> str:
        """What went wrong; empty if nothing did."""
        ...


Outcome = TypeVar("Outcome", bound=EndedJob[Hashable])


def read_kept(path: Path, kind: type[Kept]) -> list[Kept]:
    """What a file holds; nothing if there is none. A last line that was cut off is taken away."""
    if not path.exists():
        return []
    whole, _, cut_off = path.read_bytes().rpartition(b"\n")
    if cut_off:
        os.truncate(path, path.stat().st_size - len(cut_off))
    return [_decoded(path, number, line, kind) for number, line in enumerate(whole.splitlines(), 1)]


def lines_kept(path: Path) -> int:
    """How many results a file holds."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def keep(path: Path, result: object) -> None:
    """Add one more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


class KeptOutcomes(Generic[Job, Outcome]):
    """Outcomes by job; with a file, those of it too, and new ones are added to it at once."""

    kind: type[Outcome]

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._outcomes: dict[Job, Outcome] = {}
        for outcome in [] if path is None else read_kept(path, self.kind):
            if not outcome.trouble:  # one that failed is made again
                self._outcomes[outcome.job] = outcome  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._outcomes)

    def get(self, job: Job) -> Outcome | None:
        """What is known of a job."""
        return self._outcomes.get(job)

    def add(self, outcome: Outcome) -> None:
        """A run is over."""
        self._outcomes[outcome.job] = outcome  # type: ignore[index]
        if self._path is not None:
            keep(self._path, outcome)


def _decoded(path: Path, number: int, line: bytes, kind: type[Kept]) -> Kept:
    try:
        return decode_json(line, kind=kind)
    except Undecodable as error:
        raise ConfigError(f"line {number} of {path} is no result of a run: {error}.") from None
