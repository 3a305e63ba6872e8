"""What a host that has proved the secret may offer: nothing stays open, and nothing empty is taken."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.runtime.hosts.remote_hosts import RemoteHost
from paceline.runtime.messages.hosts import HOST, Gone, Offer


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def host(tmp_path: Path) -> RemoteHost:
    config = RunConfig(run="r", folder=str(tmp_path), workers=2, here=1, listen="127.0.0.1:0")
    return RemoteHost("elsewhere", lambda heard: None, lambda: None, (1,), config)


def say(host: RemoteHost, message: msgspec.Struct) -> None:
    host.arrived(0, HOST, msgspec.msgpack.encode(message))


def test_offers_that_are_repeated_leak_no_descriptor(host: RemoteHost) -> None:
    before = open_descriptors()
    say(host, Offer(4096))
    one = open_descriptors()
    for _ in range(50):
        say(host, Offer(4096))
    assert open_descriptors() == one
    say(host, Gone("killed"))
    assert open_descriptors() == before


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_an_offer_of_nothing_is_refused_by_its_size(host: RemoteHost, size_bytes: int) -> None:
    with pytest.raises(RunError, match=f"an offer of {size_bytes} bytes"):
        say(host, Offer(size_bytes))
