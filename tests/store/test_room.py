"""A full disk: old checkpoints give way to weights and to newer ones, the newest that is sound never does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.store.disk.checkpoint import Snapshot, save_weights, write_checkpoint
from paceline.store.disk.folders import all_saved_in
from support.disks import fill, small_disk

WEIGHTS = {"w": torch.arange(50_000.0)}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        yield disk


def kept(run: Path, count: int) -> list[str]:
    """Checkpoints, and a disk that is full."""
    for number in range(count):
        write_checkpoint(run / "checkpoint", Snapshot(WEIGHTS, {}, "state.json", b"%d" % number), 9)
    fill(run / "filler")
    return [path.name for path in all_saved_in(run)]


def test_weights_that_find_no_room_take_that_of_the_oldest_checkpoint_and_say_so(run: Path) -> None:
    told: list[str] = []
    assert kept(run, 3) == ["checkpoint", "checkpoint.previous", "checkpoint.previous.2"]
    save_weights(run / "weights.safetensors", WEIGHTS, told.append)
    assert [path.name for path in all_saved_in(run)] == ["checkpoint", "checkpoint.previous"]
    assert torch.equal(load_file(run / "weights.safetensors")["w"], WEIGHTS["w"])
    assert told == [
        f"no room was left at {run}: the checkpoint checkpoint.previous.2 was removed to make some"
    ]


def test_the_only_checkpoint_is_not_given_for_weights(run: Path) -> None:
    told: list[str] = []
    assert kept(run, 1) == ["checkpoint"]
    with pytest.raises(SafetensorError, match="os error 28"):
        save_weights(run / "weights.safetensors", WEIGHTS, told.append)
    assert (told, [path.name for path in all_saved_in(run)]) == ([], ["checkpoint"])
    assert not list(run.glob("*.partial"))


def test_a_damaged_checkpoint_gives_way_before_an_older_one_that_is_sound(run: Path) -> None:
    kept(run, 2)
    with (run / "checkpoint" / "model.safetensors").open("r+b") as file:
        file.seek(999)
        file.write(b"x")
    save_weights(run / "weights.safetensors", WEIGHTS, [].append)
    assert [path.name for path in all_saved_in(run)] == ["checkpoint.previous"]


def test_a_checkpoint_that_finds_no_room_takes_that_of_the_oldest(run: Path) -> None:
    told: list[str] = []
    kept(run, 3)
    write_checkpoint(run / "checkpoint", Snapshot(WEIGHTS, {}, "state.json", b"3"), 9, told.append)
    states = [(path / "state.json").read_bytes() for path in all_saved_in(run)]
    assert states == [b"3", b"2", b"1"]
    assert len(told) == 1
