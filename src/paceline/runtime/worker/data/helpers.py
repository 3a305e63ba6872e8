"""Keeps the processes of a DataLoader (`num_workers`) alive while a run that was asked to end saves itself.

torch ends them at any SIGTERM, also one that was sent to all processes of the run, and their worker fails for
want of data before it has come to the iteration at which peers save. Called by `runtime/script`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils.data._utils import signal_handling, worker

from paceline.fabric.stop_signals import answer

SET_HANDLERS = "_set_worker_signal_handlers"
_patched = False


def spare_helpers() -> None:
    """From now on, they end when their worker wants them to, or is gone."""
    global _patched
    loop, handlers = worker._worker_loop, getattr(signal_handling, SET_HANDLERS, None)
    if _patched or handlers is None:  # another torch: they end as ever
        return
    _patched = True
    done: list[Any] = []

    @wraps(loop)
    def noting(kind: Any, dataset: Any, indices: Any, data: Any, done_event: Any, *others: Any) -> None:
        done.append(done_event)
        loop(kind, dataset, indices, data, done_event, *others)

    def set_handlers() -> None:
        handlers()
        if done:
            answer(_unless_wanted(done[-1], os.getppid()))

    setattr(worker, loop.__name__, noting)
    setattr(signal_handling, SET_HANDLERS, set_handlers)


def _unless_wanted(done: Any, parent: int) -> Callable[[], None]:
    def end() -> None:
        if done.is_set() or os.getppid() != parent:
            os._exit(0)

    return end
