"""What a sampler gives, in pieces: compact arrays where it gives whole numbers, or batches of them.

PyTorch's own samplers make one Python list of a whole epoch, or of 32 numbers at a time. What they would give
is drawn here with the same calls into tensors; any other sampler is iterated over. `sample_order.py` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

BLOCK = 1 << 16
"""Positions drawn at a time."""
SMALL = np.iinfo(np.int32).max


class OrderPiece(Protocol):
    """Some of an order."""

    def __len__(self) -> int: ...

    def cut(self, start: int, stop: int) -> list[Any]:
        """What stands there, as the sampler gives it."""
        ...


class Numbers:
    """Whole numbers."""

    def __init__(self, values: Tensor | np.ndarray[Any, Any]) -> None:
        array = np.asarray(values)
        small = array.size == 0 or (array.min() >= -SMALL and array.max() <= SMALL)
        self._values = array.astype(np.int32) if small else array

    def __len__(self) -> int:
        return len(self._values)

    def cut(self, start: int, stop: int) -> list[Any]:
        """As Python's integers."""
        found: list[Any] = self._values[start:stop].tolist()
        return found


class Batches:
    """Lists of whole numbers."""

    def __init__(self, lists: Sequence[list[int]]) -> None:
        self._flat = Numbers(np.array(list(chain.from_iterable(lists)), dtype=np.int64))
        self._bounds = np.array([0, *accumulate(map(len, lists))])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def cut(self, start: int, stop: int) -> list[Any]:
        """As lists of Python's integers."""
        bounds = self._bounds[start : stop + 1].tolist()
        return [self._flat.cut(first, end) for first, end in pairwise(bounds)]


class Looked:
    """What stands at some places of a sequence, or is it that stands in one."""

    def __init__(self, values: Sequence[Any], places: Numbers | None = None) -> None:
        self._values, self._places = values, places

    def __len__(self) -> int:
        return len(self._values if self._places is None else self._places)

    def cut(self, start: int, stop: int) -> list[Any]:
        """As it is."""
        if self._places is None:
            return list(self._values[start:stop])
        return [self._values[place] for place in self._places.cut(start, stop)]


def pieces_of(sampler: Any) -> Iterator[OrderPiece]:
    """What one pass over a sampler gives, drawn as far as it is asked for."""
    known = KNOWN.get(type(sampler))
    if known is None or not _agrees(sampler, known):
        return iterated(iter(sampler))
    return known(sampler, BLOCK)


def in_one_piece(sampler: Any) -> bool:
    """Whether a pass is drawn by one call, which cannot be told of on the way."""
    at_once = type(sampler) is SubsetRandomSampler
    return at_once or (type(sampler) is RandomSampler and not sampler.replacement)


def iterated(given: Iterator[Any]) -> Iterator[OrderPiece]:
    """Of anything that can be iterated over."""
    while items := _some(given):
        yield _compact(items)


def _some(given: Iterator[Any]) -> list[Any]:
    """A block of items, or fewer where they are large batches."""
    items, weight = list[Any](), 0
    while weight < BLOCK and (more := list(islice(given, 256))):
        items += more
        weight += sum(len(each) if type(each) is list else 1 for each in more)
    return items


def _compact(items: list[Any]) -> OrderPiece:
    kinds = set(map(type, items))
    try:
        if kinds == {int}:
            return Numbers(np.array(items, dtype=np.int64))
        if kinds == {list} and set(map(type, chain.from_iterable(items))) <= {int}:
            return Batches(items)
    except OverflowError:  # larger than any index
        pass
    return Looked(items)


def _sequential(sampler: SequentialSampler, _: int) -> Iterator[OrderPiece]:
    yield Looked(range(len(sampler.data_source)))


def _random(sampler: RandomSampler, block: int) -> Iterator[OrderPiece]:
    n, count, generator = len(sampler.data_source), sampler.num_samples, sampler.generator
    rest = count % n
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    if sampler.replacement:
        for size in _sizes(count, block):
            yield Numbers(torch.randint(high=n, size=(size,), dtype=torch.int64, generator=generator))
        return
    whole, at_a_time = count // n, max(1, block // n)
    for done in range(0, whole, at_a_time):
        turns = range(min(at_a_time, whole - done))
        yield Numbers(torch.cat([torch.randperm(n, generator=generator) for _ in turns]))
    if rest or sampler.generator is not None:  # torch draws it also if nothing of it is used
        last = torch.randperm(n, generator=generator)[:rest]
        if rest:
            yield Numbers(last)


def _weighted(sampler: WeightedRandomSampler, block: int) -> Iterator[OrderPiece]:
    count = sampler.num_samples
    at_a_time = max(block, len(sampler.weights))  # each call adds all weights up
    for size in _sizes(count, at_a_time) if sampler.replacement else [count]:
        yield Numbers(
            torch.multinomial(sampler.weights, size, sampler.replacement, generator=sampler.generator)
        )


def _subset(sampler: SubsetRandomSampler, _: int) -> Iterator[OrderPiece]:
    places = torch.randperm(len(sampler.indices), generator=sampler.generator)
    yield Looked(sampler.indices, Numbers(places))


def _sizes(count: int, block: int) -> Iterable[int]:
    """Blocks; the last is larger rather than a single number, which torch draws in another way."""
    while count > block + 1:
        yield block
        count -= block
    yield count


KNOWN: dict[type, Callable[[Any, int], Iterator[OrderPiece]]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
    WeightedRandomSampler: _weighted,
    SubsetRandomSampler: _subset,
}


def _agrees(sampler: Any, known: Callable[[Any, int], Iterator[OrderPiece]]) -> bool:
    """Whether this version of torch draws as it is done here: tried on a small sampler of the same kind."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        theirs = _small(sampler)
        expected = list(theirs), *_standing(theirs)
        torch.default_generator.manual_seed(1)
        ours = _small(sampler)
        return (_all(known(ours, 32)), *_standing(ours)) == expected


def _small(sampler: Any) -> Any:
    own = None if getattr(sampler, "generator", None) is None else torch.Generator().manual_seed(2)
    if isinstance(sampler, RandomSampler):
        high = range(len(sampler.data_source) if sampler.replacement else 40)
        return RandomSampler(high, sampler.replacement, 99, own)
    if isinstance(sampler, WeightedRandomSampler):
        return WeightedRandomSampler(
            [1.0, 0.5, 0.0, 2.0] * 5, 15 * 5**sampler.replacement, sampler.replacement, own
        )
    if isinstance(sampler, SubsetRandomSampler):
        return SubsetRandomSampler(range(50, 90), own)
    return SequentialSampler(range(40))


def _all(pieces: Iterable[OrderPiece]) -> list[Any]:
    return [item for piece in pieces for item in piece.cut(0, len(piece))]


def _standing(sampler: Any) -> tuple[bytes, bytes]:
    """Where the generators stand."""
    own = getattr(sampler, "generator", None)
    drawn = b"" if own is None else own.get_state().numpy().tobytes()
    return torch.default_generator.get_state().numpy().tobytes(), drawn
