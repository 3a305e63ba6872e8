"""A checkpoint that is not what was written is refused, with the file named; the one before it is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.store.disk.checkpoint import Snapshot, write_checkpoint
from paceline.store.disk.checksums import MANIFEST, DamagedCheckpoint, newest_sound, unchecked, verify
from paceline.store.disk.folders import saved_in

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", MANIFEST)


def write(run: Path, number: int, keep: int = 2) -> Path:
    state = b'{"checkpoint": 2, "version": %d}' % number
    taken = Snapshot({"w": torch.full((9,), float(number))}, {"m": torch.ones(3)}, "state.json", state)
    write_checkpoint(run / "checkpoint", taken, keep)
    return run / "checkpoint"


def version(folder: Path | None) -> bytes:
    assert folder is not None
    return (folder / "state.json").read_bytes()[-2:-1]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("run"), 1)


@given(file=st.sampled_from(FILES), bit=st.integers(0, 1 << 16))
def test_any_single_flipped_bit_is_noticed_and_its_file_is_named(whole: Path, file: str, bit: int) -> None:
    before = (whole / file).read_bytes()
    verify(whole)
    flip(whole / file, bit)
    try:
        with pytest.raises(DamagedCheckpoint, match=file):
            verify(whole)
    except pytest.fail.Exception:  # white space of the manifest means nothing
        assert file == MANIFEST
        assert before.split() == (whole / file).read_bytes().split()
    finally:
        (whole / file).write_bytes(before)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_missing_or_cut_short_is_named(tmp_path: Path, file: str) -> None:
    folder = write(tmp_path, 1)
    (folder / file).write_bytes((folder / file).read_bytes()[:-3])
    with pytest.raises(DamagedCheckpoint, match=file):
        verify(folder)
    (folder / file).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{file} is missing"):
        verify(folder)


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_the_newest_so_many_are_kept(tmp_path: Path, keep: int) -> None:
    for number in range(6):
        newest = write(tmp_path, number, keep)
        places = [newest, *(newest.with_name(f"checkpoint.previous{x}") for x in ("", ".2", ".3"))]
        kept = [int(version(folder)) for folder in places if folder.exists()]
        assert kept == list(range(number, max(-1, number - keep), -1))
    assert len(list(tmp_path.iterdir())) == keep


def test_a_smaller_number_to_keep_removes_what_is_too_much(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path, number, 4)
    write(tmp_path, 4, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "checkpoint.previous"]


def test_the_newest_that_is_sound_is_taken_and_the_damaged_ones_are_named(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, number, 3)
    assert newest_sound(tmp_path) == (tmp_path / "checkpoint", [])
    flip(tmp_path / "checkpoint" / "model.safetensors", 999)
    flip(tmp_path / "checkpoint.previous" / "state.json", 3)
    found, told = newest_sound(tmp_path)
    assert version(found) == b"0"
    assert ["model.safetensors" in told[0], "state.json" in told[1]] == [True, True]
    flip(tmp_path / "checkpoint.previous.2" / MANIFEST, 80)
    with pytest.raises(DamagedCheckpoint, match=r"model.safetensors differs .* So are the 2 before it"):
        newest_sound(tmp_path)


def test_a_checkpoint_of_the_version_before_has_no_checksums_and_is_taken_with_a_note(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    assert unchecked(str(folder)) == []
    (folder / MANIFEST).unlink()
    (folder / "state.json").write_bytes(b'{"checkpoint": 1}')
    verify(folder)
    [note] = unchecked(str(folder))
    assert "no checksums" in note
    assert saved_in(tmp_path) == folder


def test_what_could_not_be_written_leaves_nothing_half_done(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    bad = Snapshot({"w": torch.ones(2)}, {}, "no/such/folder/state.json", b"{}")
    with pytest.raises(FileNotFoundError):
        write_checkpoint(folder, bad, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    shutil.rmtree(folder)
