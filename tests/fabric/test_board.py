"""The board of clocks: what one process writes, all others read."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.fabric.board import GONE, Board


def test_nobody_takes_part_on_a_new_board_and_who_is_gone_is_behind_nobody() -> None:
    board = Board.create(3)
    assert board.present() == []
    board.note(1, 4)
    board.note(2, 0)
    assert board.present() == [1, 2]
    board.note(1, None)
    assert board.present() == [2]
    assert board.clock(1) == GONE > 10**18


def test_a_killed_process_leaves_the_clock_it_had() -> None:
    board = Board.create(2)
    board.note(0, 7)
    board.note(1, 3)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        seen = Board.of(os.dup(board.fd), 2)
        seen.note(1, 5)
        os.write(theirs, bytes([seen.clock(0), seen.clock(1)]))
        signal.pause()
        os._exit(1)
    assert os.read(ours, 2) == bytes([7, 5])
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (board.clock(0), board.clock(1), board.clocks) == (7, 5, {0: 7, 1: 5})
    for fd in (ours, theirs):
        os.close(fd)


def test_who_only_reads_a_board_cannot_write_to_it() -> None:
    board = Board.create(1)
    seen = Board.of(os.dup(board.fd), 1, writable=False)
    board.note(0, 3)
    assert seen.clock(0) == 3
    with pytest.raises(TypeError, match="read-only"):
        seen.note(0, 4)
