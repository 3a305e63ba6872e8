"""One rank of a task: `python -m paceline.parallel.plans.rank TASK SIZE FOLDER PARENT RANK`, started by
`processes`."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from paceline.decoding import decode_json
from paceline.errors import ConfigError, PacelineError
from paceline.fabric.stop_signals import die_with

PATIENCE = timedelta(minutes=10)


def main() -> None:
    """The rank that the command line names."""
    task, size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    parent, rank = int(sys.argv[4]), int(sys.argv[5])
    die_with(parent)  # nobody would end it otherwise
    carry_out(task, rank, size, folder)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # its answer is there: gloo's threads may abort an interpreter that takes itself apart


def carry_out(task: str, rank: int, size: int, folder: Path) -> None:
    """Connect, carry the task out, leave the answer in the folder."""
    try:
        answer = _carry_out(task, rank, size, folder)
    except Exception as error:
        if not isinstance(error, PacelineError):
            traceback.print_exc()
        kind = "config" if isinstance(error, ConfigError) else "error"
        text = " ".join(str(error).split())
        said = text if isinstance(error, PacelineError) else f"{type(error).__name__}: {text}"
        (folder / f"{rank}.error").write_text(f"{kind}\n{said}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for the other ranks, which wait for this one
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(answer))


def _carry_out(task: str, rank: int, size: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, _, function = task.partition(":")
    work = getattr(importlib.import_module(module), function)
    request = decode_json((folder / "request.json").read_bytes())
    store = dist.FileStore(str(folder / "meeting"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
    answer = work(rank, size, request)
    dist.destroy_process_group()
    return answer


if __name__ == "__main__":
    main()
