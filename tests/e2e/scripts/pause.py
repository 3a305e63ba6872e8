"""Where scripts wait for a test, so that it acts on a run at a known place, however fast the run is."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


class Pause:
    """Stops a script before one of its iterations until a file exists; another one shows that it waits.

    Who is doomed comes three iterations further and no more: whenever it is killed, it is still there.
    """

    def __init__(self, file: str | None, before: int, doomed: bool = False, slowly_s: float = 0.0) -> None:
        self.file = None if file is None else Path(file)
        self.left, self.doomed, self.slowly_s = before, doomed, slowly_s

    @classmethod
    def asked(cls, options: argparse.Namespace, rank: int) -> Pause:
        """What a worker was told by the options of `add_pause`."""
        file = options.pause if rank in options.only or not options.only else None
        return cls(file, options.before, rank in options.doomed, options.slowly)

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0 and self.file is not None and not self.file.exists():
            self.file.with_suffix(f".{os.getpid()}").touch()
            while not self.file.exists():
                time.sleep(0.005)
        if self.left <= -3:
            self.end()
        if self.left <= 0:
            time.sleep(self.slowly_s)

    def end(self) -> None:
        """Who is doomed does not come to the end of its script either, if there was no work left for it."""
        while self.doomed:
            time.sleep(0.005)


def add_pause(parser: argparse.ArgumentParser) -> None:
    """The options of a script that waits."""
    parser.add_argument("--pause", help="wait for this file")
    parser.add_argument("--before", type=int, default=0, help="the iteration to wait before")
    parser.add_argument("--slowly", type=float, default=0.0, help="seconds to sleep in each from then on")
    parser.add_argument("--doomed", type=int, nargs="*", default=[], help="ranks that never finish")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="ranks that wait; without it all do")
