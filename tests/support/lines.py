"""Four real processes that stay: tests have them do jobs over gloo, as lines of one to four workers."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.parallel.sequence import Line

WORKERS = 4
PATIENCE_S = 60.0


class Lines:
    """The processes, as a test sees them."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.parallel.sequence.ways"])
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(WORKERS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, f"{folder}/meeting", theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def __call__(self, job: str, workers: int, **request: Any) -> list[Any]:
        """Have the first workers form a line and do a job of `support.line_jobs`; their answers by rank."""
        for end in self._ends[:workers]:
            end.send((job, workers, request))
        answers = []
        for rank, end in enumerate(self._ends[:workers]):
            assert end.poll(PATIENCE_S), f"worker {rank} says nothing"
            answers.append(end.recv())
        for rank, (worked, answer) in enumerate(answers):
            assert worked, f"worker {rank}:\n{answer}"
        return [answer for _, answer in answers]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def lines() -> Iterator[Lines]:
    """Started, and gone afterwards, with the server that forked them."""
    with tempfile.TemporaryDirectory() as folder:
        made = Lines(folder)
        try:
            yield made
        finally:
            made.close()
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
            resource_tracker._resource_tracker._stop()


def _work(rank: int, meeting: str, end: Connection) -> None:
    from support import line_jobs

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=WORKERS)
    groups = {size: dist.new_group(range(size)) for size in range(2, WORKERS + 1)}
    while True:
        try:
            job, workers, request = end.recv()
        except EOFError:
            break
        try:
            how = request.pop("line", {})
            line = Line(rank, workers, groups.get(workers), **how)
            end.send((True, getattr(line_jobs, job)(line, **request)))
        except Exception:
            end.send((False, traceback.format_exc()))
    Path(meeting).touch()
    os._exit(0)  # an orderly end would wait for the others
