"""The progress bar of a run to an accuracy: how far it is, in time or samples."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """On standard error, and only where somebody looks; gone when the run has ended."""

    def __init__(self, title: str, limit: float, target: float) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        self._progress = Progress(
            *(*columns, TimeElapsedColumn()),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._target, self._limit = target, limit
        self._task = self._progress.add_task(title, total=limit, said="starting")

    def show(self, done: float, best: float | None) -> None:
        """The limit is the end of the bar; most runs are there sooner."""
        if done > 0:
            seen = "" if best is None else f", {100 * best:.1f} of {100 * self._target:g} %"
            said = f"{done:,.0f} of {self._limit:,g} at most{seen}"
            self._progress.update(self._task, completed=done, said=said)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
