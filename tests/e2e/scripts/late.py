"""All workers but one are ready for training."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from cases import CASES

import paceline

pace = paceline.join()
if pace.rank == 1:
    Path(sys.argv[1], "late").touch()
    time.sleep(600)
model, optimizer = CASES["momentum"].build()
pace.prepare(model, optimizer)
