"""A loader that was prepared and is not used is noticed, and nothing that only looks like it."""

from __future__ import annotations

import pytest

from paceline.runtime.worker.data.unused import Unused


def told(length: int | None, *loop: int, leaves: bool = False) -> bool:
    """What a loop hears: so many steps before the first batch, with the first, the second ..."""
    said: list[str] = []
    unused = Unused(length, said.append)
    for number, steps in enumerate(loop):
        if number:
            unused.arrived()
        for _ in range(steps):
            unused.stepped()
    if leaves:
        unused.ends()
    return bool(said)


@pytest.mark.parametrize(("length", "enough"), [(5, 5), (1000, 20), (None, 20)])
def test_without_any_batch_an_epoch_of_steps_or_a_few_are_enough(length: int | None, enough: int) -> None:
    assert told(length, enough)
    assert not told(length, enough - 1)


def test_a_short_script_that_accumulates_gradients_hears_of_it_at_its_end() -> None:
    assert told(1000, 3, leaves=True)
    assert not told(1000, 0, leaves=True)
    assert not told(1000, 0, 1, leaves=True)


def test_many_steps_with_every_batch_are_nothing_unusual() -> None:
    assert not told(4, 0, *[80] * 12, leaves=True)


@pytest.mark.parametrize("usual", [1, 3])
def test_steps_go_on_and_batches_do_not(usual: int) -> None:
    assert told(100, 0, usual, usual, usual * 100)
    assert not told(100, 0, usual, usual, usual * 100 - 1)
