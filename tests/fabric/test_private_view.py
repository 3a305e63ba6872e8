"""A worker's own view of weights that others write: every write is told, whatever was told before."""

from __future__ import annotations

import mmap

from paceline.fabric.private_view import PrivateView
from paceline.fabric.segment import Segment


def test_a_write_is_told_and_undone_whatever_was_told_before() -> None:
    """The kernel's answer is compared with the last one that was clean, which must not hide a later write."""
    segment = Segment.create(3 * mmap.PAGESIZE, "weights")
    segment.bytes.fill_(1)
    view = PrivateView(segment)
    for page in (1, 2, 1):
        assert int(view.bytes.sum()) == len(view.bytes)
        assert view.written() == view.written() == []
        at = page * mmap.PAGESIZE
        view.bytes[at] = 7
        assert view.written() == view.written() == [(at, at + mmap.PAGESIZE)]
        assert int(segment.bytes[at]) == 1
        view.undo(view.written())
        assert view.written() == []
    segment.bytes.fill_(2)
    assert int(view.bytes.sum()) == 2 * len(view.bytes)
