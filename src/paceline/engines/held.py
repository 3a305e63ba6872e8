"""A store whose process is held by whoever started it: it can be stopped, and ends with its holder."""

from __future__ import annotations

import contextlib
import os
import subprocess

import msgspec

from paceline.config import RunConfig
from paceline.engines.meeting import StoreOrder, launch_service, meeting_of
from paceline.fabric.channel import Channel
from paceline.fabric.neighbours import find_neighbour


class HeldStore:
    """The process between workers that an engine starts elsewhere."""

    def __init__(self, config: RunConfig, secret: str) -> None:
        order = msgspec.json.encode(StoreOrder(config, secret, holder=os.getpid()))
        self._process, address = launch_service("store", order)
        self.meeting = meeting_of(config, address, secret)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, if it ends within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def stop(self) -> None:
        """Ask it to end the run and to save its state."""
        self._process.terminate()

    def close(self) -> None:
        """End it if it is still there."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def speak_for(self, rank: int, text: str) -> None:
        """Tell it that a worker it may be waiting for is not going to come."""
        from paceline.runtime.messages import workers as m  # imports torch, which nothing else here needs

        with contextlib.suppress(OSError):
            sock = find_neighbour(self.meeting.name)
            if sock is None:  # it has ended
                return
            channel = Channel(sock)
            channel.send(m.Hello(os.getpid(), None, {}, rank))
            channel.send(m.Failed("error", text))
            channel.close()
