"""The board of clocks: what one process writes to its cell, all others read."""

from __future__ import annotations

import os
import signal

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
        os.write(theirs, bytes([seen.clock(0), seen.tick(1), seen.tick(1)]))
        signal.pause()
        os._exit(1)
    assert os.read(ours, 3) == bytes([7, 4, 5])
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (board.clock(0), board.clock(1), board.present()) == (7, 5, [0, 1])
    for fd in (ours, theirs):
        os.close(fd)
