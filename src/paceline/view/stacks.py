"""Where a process is: asks it for its Python stacks, and reads them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import msgspec

import paceline
from paceline.runtime.worker.stacks import STACK_SIGNAL, stack_file

ANSWER_S = 2.0
"""How long a process may take to write its stacks."""
SETTLED_S = 0.1
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


PACKAGE = str(Path(paceline.__file__).parent)


class Frame(msgspec.Struct, frozen=True):
    """One call, the innermost first."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Thread(msgspec.Struct, frozen=True):
    """One thread of a process."""

    id: str
    main: bool
    frames: tuple[Frame, ...]


def process_state(pid: int) -> str:
    """One letter, as in `ps`: R runs, S sleeps, D waits for a device, T was stopped; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ask_for_stacks(folder: Path, names: dict[int, str]) -> dict[int, tuple[Thread, ...]]:
    """Per process of this machine and its name in the run: its threads now, if it answers. All are asked
    at once."""
    sizes = {pid: _size(stack_file(folder, name)) for pid, name in names.items()}
    asked = {pid for pid in names if _signal(pid)}
    until = time.monotonic() + ANSWER_S
    told: dict[int, tuple[Thread, ...]] = {}
    while asked - told.keys() and time.monotonic() < until:
        time.sleep(0.02)
        for pid in asked - told.keys():
            path = stack_file(folder, names[pid])
            if _size(path) > sizes[pid] and time.time() - path.stat().st_mtime > SETTLED_S:
                told[pid] = parse_stacks(path.read_bytes()[sizes[pid] :].decode(errors="replace"))
    return told


def parse_stacks(text: str) -> tuple[Thread, ...]:
    """What `faulthandler` wrote; the main thread, which is the oldest, comes first."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            threads.append((found[2], []))
        elif (found := _FRAME.match(line)) and threads:
            threads[-1][1].append(Frame(found[1], int(found[2]), found[3]))
    whole = [Thread(name, number == 0, tuple(f)) for number, (name, f) in enumerate(reversed(threads))]
    return tuple(whole)


def own_frames(thread: Thread, inner: bool = True) -> list[Frame]:
    """Without those that only start the script; without `inner`, from the script's own call on."""
    frames = list(thread.frames)
    start = next((n for n, f in enumerate(frames) if f.file.startswith("<frozen runpy")), len(frames))
    ours = [n for n, f in enumerate(frames[:start]) if f.file.startswith(PACKAGE)]
    return frames[0 if inner or not ours else ours[-1] + 1 : start]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _signal(pid: int) -> bool:
    """Ask a process, unless it is stopped or would die of it since it is not ready yet."""
    if process_state(pid) in ("", "T", "Z") or not _catches(pid):
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, STACK_SIGNAL)
        return True
    return False


def _catches(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)
