"""Chunks of data that belong to workers, for good or in rotation, and what they share of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.store.work.budget import Batch, Source
from paceline.store.work.chunks import Injection, arrange, chunk, shards_of

sources = st.builds(Source, st.integers(12, 60), st.integers(1, 3), st.booleans())
workers_ = st.integers(1, 4)


def config(workers: int, shards: str, **more: Any) -> RunConfig:
    return RunConfig(run="", folder="", workers=workers, shards=shards, **more)  # type: ignore[arg-type]


def read(source: Source, workers: int, shards: str, epochs: int) -> dict[int, list[list[int]]]:
    """Per worker and epoch, the positions it reads."""
    budget = shards_of(source, config(workers, shards))
    found: dict[int, list[list[int]]] = {rank: [[] for _ in range(epochs)] for rank in range(workers)}
    for rank in range(workers):
        while (batch := budget.draw(rank)).epoch < epochs:
            found[rank][batch.epoch] += range(batch.first, batch.end)
            budget.finish(rank, [batch])
    return found


@given(source=sources, workers=workers_)
def test_in_rotation_everybody_reads_everything_once_and_in_an_epoch_all_read_different_data(
    source: Source, workers: int
) -> None:
    found = read(source, workers, "rotating", workers)
    everything = list(range(source.samples or 0))
    for passes in found.values():
        assert sorted(position for each in passes for position in each) == everything
    for epoch in range(workers):
        assert sorted(position for passes in found.values() for position in passes[epoch]) == everything


@given(source=sources, workers=workers_, epochs=st.integers(1, 3))
def test_own_chunks_stay_ones_own_and_together_are_everything(
    source: Source, workers: int, epochs: int
) -> None:
    found = read(source, workers, "own", epochs)
    for passes in found.values():
        assert all(each == passes[0] for each in passes)
    assert sorted(p for passes in found.values() for p in passes[0]) == list(range(source.samples or 0))


@given(source=sources, workers=workers_)
def test_chunks_differ_by_one_batch_at_most(source: Source, workers: int) -> None:
    sizes = [len(chunk(source, workers, number)) for number in range(workers)]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == source.batches


# -- injection ---------------------------------------------------------------------------------------


def injected(source: Source, workers: int, inject: str) -> Injection:
    smaller, found = arrange(source, config(workers, "own", inject=inject))
    assert found is not None
    assert smaller == found.source
    return found


@given(
    batch=st.integers(8, 64),
    workers=st.integers(2, 12),
    donors=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    share=st.sampled_from([0.25, 0.5, 1.0]),
)
def test_with_what_is_injected_a_batch_is_as_large_as_the_loaders_at_most(
    batch: int, workers: int, donors: float, share: float
) -> None:
    source = Source(40 * batch, batch)
    try:
        found = injected(source, workers, f"{donors}:{share}")
    except ConfigError:  # nothing to share: refused
        return
    size = found.source.batch
    assert size + found.donors * found.shared <= batch
    assert found.donors >= donors * workers
    for number in range(found.source.batches):
        beside = found.beside(Batch(0, number * size, size))
        assert size + sum(count for _, count in beside) <= batch


@given(seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_at_a_step_all_get_the_same_samples_but_those_who_give_them(seed: int, epoch: int) -> None:
    """Four workers, half of which share half of their four samples."""
    found = arrange(Source(64, 8), config(4, "own", inject="0.5:0.5", seed=seed))[1]
    assert found is not None
    size = found.source.batch
    chunks = [chunk(found.source, 4, number) for number in range(4)]
    for step in range(min(len(each) for each in chunks)):
        got = [set(found.beside(Batch(epoch, (each.start + step) * size, size))) for each in chunks]
        given_ = set.union(*got)
        assert len(given_) == found.donors == 2
        for number, each in enumerate(chunks):
            own = {((each.start + step) * size, found.shared)}
            assert got[number] == given_ - own


@pytest.mark.parametrize(
    ("source", "dials", "words"),
    [
        (None, {"shards": "own"}, "an iterable dataset"),
        (None, {"shards": "rotating"}, "map-style"),
        (Source(12, 1, whole=True), {"shards": "own", "inject": "0.5:0.5"}, "a batch sampler of its own"),
        (Source(64, 2), {"shards": "own", "inject": "0.5:0.5"}, "less than one sample"),
    ],
)
def test_what_a_loader_cannot_do_is_refused(source: Source | None, dials: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arrange(source, RunConfig(run="", folder="", workers=4, **dials))


@pytest.mark.parametrize(
    ("dials", "words"),
    [
        ({"inject": "0.5:0.5", "workers": 4}, "shards 'shared'"),
        ({"inject": "0.5:0.5", "workers": 1, "shards": "own"}, "1 workers"),
        ({"inject": "0.5", "workers": 4, "shards": "own"}, "DONORS:SHARE"),
        ({"inject": "0.5:2", "workers": 4, "shards": "own"}, "got '0.5:2'"),
        ({"balance": True, "shards": "rotating"}, "--shards rotating gives every worker the same"),
    ],
)
def test_settings_that_do_not_fit_are_refused(dials: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig(run="", folder="", **dials)


def test_chunks_are_given_by_rank() -> None:
    found = read(Source(12, 2), 3, "own", 1)
    assert [found[rank][0] for rank in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_equal_shares_are_every_nth_batch_and_a_shared_budget_goes_by_who_comes() -> None:
    equal, shared = (shards_of(Source(12, 2), config(3, shards)) for shards in ("equal", "shared"))
    assert [equal.draw(1).first for _ in range(2)] == [2, 8]
    assert [shared.draw(1).first for _ in range(2)] == [0, 2]


def test_without_chunks_nobody_needs_to_know_the_positions() -> None:
    assert arrange(None, config(4, "shared")) == (None, None)
    assert arrange(None, config(4, "own"), streams=True) == (None, None)


def test_one_sample_is_enough_to_share() -> None:
    smaller, injection = arrange(Source(64, 4), config(4, "own", inject="0.25:0.5"))
    assert smaller is not None
    assert injection is not None
    assert (smaller.batch, injection.donors, injection.shared) == (2, 1, 1)


def test_of_a_last_short_batch_no_more_is_shared_than_it_has() -> None:
    injection = Injection(Source(9, 4), workers=3, seed=0, donors=3, shared=2)
    assert injection.beside(Batch(0, 0, 4)) == [(4, 2), (8, 1)]
