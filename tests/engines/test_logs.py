"""Output of workers elsewhere: only who knows the secret is heard, and each rank once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.engines.logs import LogBook, call_home
from paceline.errors import ConfigError, RunError
from support.runs import wait_until

SECRET = "the secret of a run in the tests"
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[LogBook]:
    with closing(LogBook("127.0.0.1", SECRET, tmp_path, workers=2)) as made:
        yield made


def test_what_a_worker_prints_stands_in_its_log(book: LogBook, tmp_path: Path) -> None:
    for rank in (1, 0):
        with call_home(book.address, SECRET, rank) as home:
            home.sendall(b"epoch 1\n" * 10_000 + f"rank {rank}\n".encode())
    book.settle()
    for rank in (0, 1):
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text() == "epoch 1\n" * 10_000 + f"rank {rank}\n"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_has_come_before_or_does_not_exist_is_turned_away(book: LogBook, rank: int) -> None:
    with call_home(book.address, SECRET, 0), pytest.raises(RunError, match="did not accept"):
        call_home(book.address, SECRET, rank)


def test_who_does_not_know_the_secret_is_not_heard(book: LogBook, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret is wrong"):
        call_home(book.address, SECRET + "!", 0)
    with socket.create_connection(book.address) as stranger:
        stranger.sendall(b"x" * 1000)
    with call_home(book.address, SECRET, 0) as home:
        home.sendall(b"hello\n")
    wait_until(lambda: 0 in book.ended, "all is said", 10)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank0.log"]
    assert (tmp_path / "logs" / "rank0.log").read_text() == "hello\n"
