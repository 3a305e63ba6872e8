"""A worker of the benchmark of strategies that a command has started, on a host of a testbed.

Under `paceline train` its only word is the file with the request. Started by itself, as torchrun would, the
name of a strategy of torch's comes first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

import paceline
from paceline_bench.strategies.runs.body import train
from paceline_bench.strategies.runs.request import read_request
from paceline_bench.strategies.runs.sides import TORCH, OurSide


def main(words: list[str]) -> None:
    """One run."""
    *named, path = words
    request = read_request(Path(path))
    if not named:
        train(OurSide(paceline.join()), request)
        return
    dist.init_process_group("gloo")
    train(TORCH[named[0]](request), request)


if __name__ == "__main__":
    main(sys.argv[1:])
