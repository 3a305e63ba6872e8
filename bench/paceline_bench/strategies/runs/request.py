"""What a worker of any strategy is told, and what it tells in the end: plain JSON in files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.decoding import decode_json


class Pause(msgspec.Struct, frozen=True):
    """A worker's process stands still, as if its host had been taken away for a while."""

    rank: int
    after: int
    """Iterations of its own."""
    seconds: float


class StrategyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run, the same words for every strategy."""

    folder: str
    """Where answers and weights go."""
    data: str
    """File with the samples, in the order of the run."""
    model: str
    width: int
    batch: int
    """Of one worker."""
    lr: float
    seed: int
    workers: int
    device_s: float | None = None
    """What an emulated device takes for `of` samples; None: the processor computes, as fast as it is."""
    of: int = 1
    slow: dict[int, float] = {}
    ddp_buckets: int | None = None
    """Into how many parts DDP cuts its gradients; None: torch's own, of 1 MiB first and 25 then."""
    pause: Pause | None = None

    def save(self) -> Path:
        """For processes that are started with a command."""
        path = Path(self.folder) / "request.json"
        path.write_bytes(msgspec.json.encode(self))
        return path


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has seen."""

    rank: int
    world: int
    """How many workers there were, as its own system says."""
    began: float
    """When its first batch came; all workers read the same clock."""
    ends: list[float]
    """When each of its iterations was over."""
    samples: list[int]
    """Of each."""
    losses: list[float | None]
    """None: it was NaN or infinity, for which JSON has no word."""
    held_bytes: int
    """Parameters, gradients and optimizer state in its own memory, after a step."""
    peak_bytes: int
    """The most memory its process had at a time, beyond what was there before the model."""
    late: float
    """Share of timed parts that really took longer than the emulated device."""
    shared_bytes: int = 0
    """What of its memory a parameter server on the same host has as well: weights, and its own gradients."""
    server_bytes: int | None = None
    """The most that the server's process had at a time, beyond what was there before the run; the first
    worker tells, where there is a server on its host."""


def read_request(path: Path) -> StrategyRequest:
    """The other end of `save`."""
    return decode_json(path.read_bytes(), kind=StrategyRequest)


def write_answer(folder: Path, answer: Answer) -> None:
    """Complete, or not there."""
    unfinished = folder / f"answer-{answer.rank}.unfinished"
    unfinished.write_bytes(msgspec.json.encode(answer))
    unfinished.rename(folder / f"answer-{answer.rank}.json")


def read_answers(folder: Path, workers: int) -> list[Answer]:
    """Of all ranks that have answered."""
    paths = [folder / f"answer-{rank}.json" for rank in range(workers)]
    return [decode_json(path.read_bytes(), kind=Answer) for path in paths if path.exists()]
