"""Work in chunks: every worker has data of its own, for good or in rotation.

The order of the first epoch is cut into one chunk of batches per worker, and stays as it is. With `own`,
worker n reads chunk n in every epoch and never another (what SelSync's paper calls default partitioning).
With `rotating` it goes on to the next chunk with every epoch (SelDP): at any time workers read different
chunks, in an epoch all of them together read everything once, and after as many epochs as there are
workers each has seen everything. What a lost worker was to read is dealt to the others.

*Injection*, for chunks of unlike data: at every step some workers, drawn at random, share the beginning of
their batch with all others. Everybody can load any sample, so everybody computes by itself what is shared,
and nothing has to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from random import Random
from typing import Any

import msgspec

from paceline.amounts import parse_injection
from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.store.work.budget import Batch, Budget, Source

CHUNKED = ("own", "rotating")


def chunk(source: Source, workers: int, number: int) -> range:
    """The batches of a chunk; chunks differ by one batch at most."""
    return range(number * source.batches // workers, (number + 1) * source.batches // workers)


class Chunked(Budget):
    """Every worker has its own chunk in every epoch."""

    def __init__(self, source: Source, workers: int, rotating: bool, level: bool = False) -> None:
        self._workers, self._rotating = workers, rotating
        super().__init__(source, workers, "equal", level)

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, everybody with its own."""
        super().load(state)
        self._deal_again()

    @property
    def _turns(self) -> int:
        """As many as the longest chunk has batches: at each of them every chunk gives one."""
        return -(-self.source.batches // self._workers)

    @property
    def _section(self) -> int:
        return max(1, super()._section // self._workers)

    def _deal(self, epoch: int, start: int, stop: int) -> dict[int, Sequence[int]]:
        living, turn, left = sorted(self._live), epoch if self._rotating else 0, list[int]()
        shares: dict[int, list[int]] = {rank: [] for rank in living}
        for rank in range(self._workers):
            batches = chunk(self.source, self._workers, (rank + turn) % self._workers)
            shares.get(rank, left).extend(batches[start:stop])
        for index, batch in enumerate(left):
            shares[living[index % len(living)]].append(batch)
        return dict(shares)

    def _stretches(self, epoch: int, start: int, stop: int) -> list[Batch]:
        parts = [chunk(self.source, self._workers, each)[start:stop] for each in range(self._workers)]
        return [self._stretch(epoch, part.start, part.stop) for part in parts if part]


class Injection(msgspec.Struct, frozen=True):
    """Which samples of others a batch is filled up with."""

    source: Source
    """With the batch size that leaves room for them."""
    workers: int
    seed: int
    donors: int
    """How many share at a step."""
    shared: int
    """Samples that each of them shares."""

    def beside(self, batch: Batch) -> list[tuple[int, int]]:
        """Where the samples lie that go with a batch: first positions and counts."""
        number = batch.first // self.source.batch
        chunks = [chunk(self.source, self.workers, each) for each in range(self.workers)]
        own = next(i for i, each in enumerate(chunks) if number in each)
        step = number - chunks[own].start
        drawn = Random(f"{self.seed}/{batch.epoch}/{step}").sample(range(self.workers), self.donors)
        firsts = [(chunks[each].start + step, chunks[each]) for each in sorted(drawn) if each != own]
        starts = [index * self.source.batch for index, there in firsts if index in there]
        return [(start, min(self.shared, self.source.units - start)) for start in starts]


def arrange(
    source: Source | None, config: RunConfig, streams: bool = False
) -> tuple[Source | None, Injection | None]:
    """A loader's work as it is dispensed under a configuration; refuses what it cannot do.

    `streams`: there is a loader, but of an iterable dataset, which `own` leaves to every worker as it is.
    """
    if config.shards not in CHUNKED or (source is None and streams and config.shards == "own"):
        return source, None
    if source is None:
        raise ConfigError(
            f"--shards {config.shards} cuts the positions of a loader's sampler into chunks, and an iterable "
            "dataset, or a run without a prepared loader, has none. Prepare a loader of a map-style dataset."
        )
    if not config.inject:
        return source, None
    if source.whole:
        raise ConfigError(
            "--inject fills batches up with samples of others, and this loader has a batch sampler of its "
            "own, which makes the batches itself. Give the loader a batch_size and a sampler."
        )
    return _with_room(source, config)


def _with_room(source: Source, config: RunConfig) -> tuple[Source, Injection]:
    """A smaller batch, so that with what is injected it is as large as the loader's at most."""
    donors_share, batch_share = parse_injection(config.inject)
    donors = ceil(donors_share * config.workers)
    batch = floor(source.batch / (1 + batch_share * donors))
    shared = floor(batch_share * batch)
    if shared < 1:
        raise ConfigError(
            f"--inject {config.inject} with {config.workers} workers leaves {batch} of the loader's "
            f"{source.batch} samples per batch, and {batch_share:g} of that is less than one sample to "
            "share. Use a larger batch_size, or larger shares."
        )
    smaller = msgspec.structs.replace(source, batch=batch)
    return smaller, Injection(smaller, config.workers, config.seed, donors, shared)


def shards_of(source: Source, config: RunConfig, level: bool = False) -> Budget:
    """The work of a run as its configuration has it dispensed; `level`: epochs end together."""
    if config.shards in CHUNKED:
        return Chunked(source, config.workers, config.shards == "rotating", level)
    return Budget(source, config.workers, "equal" if config.shards == "equal" else "shared", level)
