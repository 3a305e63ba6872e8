"""What a launcher and its zygote say to each other."""

from __future__ import annotations

import msgspec

from paceline.config import RunConfig
from paceline.decoding import MessageDecoder
from paceline.fabric.tls import Trust


class Guest(msgspec.Struct, frozen=True):
    """A host that takes part in a run whose store is elsewhere."""

    address: tuple[str, int]
    session: str
    ranks: tuple[int, ...]
    trust: Trust | None = None
    listen: str = ""
    """Where it listens if it holds a portion of the store; empty: at its own address, on a free port."""
    reach: str = ""
    """Where other hosts are told to come, if that is another address."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start this run, or this host's part of it."""

    config: RunConfig
    secret: str = ""
    """Of a run that listens."""
    guest: Guest | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the run cleanly: its state is saved."""


class Quit(msgspec.Struct, frozen=True, tag=True):
    """End all that is left at once. A launcher that goes without a word was killed: its run is saved."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The run's processes exist."""

    pids: tuple[int, ...]
    """Of the workers, by rank."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All processes of the run are gone."""

    statuses: dict[int, int]
    """Per rank, as the operating system reports it: negative for a signal."""
    store_status: int
    hosts: dict[int, str] = {}
    """Per rank, where it ran; empty when all ran here."""
    detail: str = ""
    """What whoever placed the workers says about their end."""


ToZygote = Launch | Stop | Quit
FromZygote = Started | Ended

zygote_decoder: MessageDecoder[ToZygote] = MessageDecoder(ToZygote)
launcher_decoder: MessageDecoder[FromZygote] = MessageDecoder(FromZygote)
