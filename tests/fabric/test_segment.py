"""Shared memory without a name: sealed, checked for room, gone with its last user."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError
from paceline.fabric import segment as module
from paceline.fabric.segment import Segment, check_room


def test_it_is_zeroed_and_two_mappings_see_the_same() -> None:
    first = Segment.create(4096, "test")
    second = Segment(os.dup(first.fd), 4096)
    assert int(first.bytes.sum()) == 0
    first.bytes[7] = 5
    assert int(second.bytes[7]) == 5
    first.close_fd()
    second.close_fd()


def test_nobody_can_resize_it() -> None:
    segment = Segment.create(4096, "test")
    for size in (0, 100, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    segment.close_fd()


def test_once_sealed_others_can_only_read_and_the_owner_goes_on_writing() -> None:
    owner = Segment.create(4096, "test")
    owner.seal_for_readers()
    with pytest.raises(PermissionError):
        mmap.mmap(owner.fd, 4096, access=mmap.ACCESS_WRITE)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(owner.fd, b"x", 0)
    reader = Segment(owner.fd, 4096, writable=False)
    owner.bytes[0] = 9
    assert int(reader.bytes[0]) == 9
    owner.close_fd()


def test_views_outlive_the_descriptor() -> None:
    segment = Segment.create(64, "test")
    view = segment.bytes.view(torch.float32)
    segment.close_fd()
    segment.close_fd()
    view.fill_(2.0)
    assert float(view.sum()) == 32.0


def test_nothing_is_left_behind() -> None:
    def ours() -> list[str]:
        fds = Path("/proc/self/fd")
        links = [os.readlink(fd) for fd in fds.iterdir() if fd.is_symlink() and os.path.lexists(fd)]
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [text for text in [*links, *maps] if "paceline-vanishes" in text]

    named = set(os.listdir("/dev/shm"))
    segment = Segment.create(4096, "vanishes")
    assert len(ours()) >= 2  # descriptors and the mapping
    assert set(os.listdir("/dev/shm")) == named
    segment.close_fd()
    del segment
    gc.collect()
    assert ours() == []


@pytest.mark.parametrize("scarce", ["_available_bytes", "_cgroup_room_bytes"])
def test_too_little_memory_is_told_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    monkeypatch.setattr(module, scarce, lambda: 50_000_000)
    check_room(50_000_000, "fits")
    with pytest.raises(ConfigError, match=r"the store needs 60 MB of shared memory, 50 MB are available"):
        check_room(60_000_000, "the store")
    with pytest.raises(ConfigError, match="Use fewer workers"):
        Segment.create(60_000_000, "the store")


def test_the_room_a_machine_has_is_known() -> None:
    assert module._available_bytes() > 1_000_000
    assert module._cgroup_room_bytes() > 1_000_000


def test_elsewhere_than_on_linux_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="needs Linux"):
        Segment.create(64, "test")
