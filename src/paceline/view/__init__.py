"""What a person sees of a run. Every view reads events and results, nothing else.

    progress   a run while it goes on, in the terminal
    beside     the same in lines, where others write to the terminal too
    table      one result, or several side by side, in the terminal
    report     one HTML file about one or several runs

Names are looked up when they are first used, so that a command pays only for the view it shows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.view.progress import RunProgress, live
    from paceline.view.report import write_report
    from paceline.view.table import comparison, summary

__all__ = ["RunProgress", "comparison", "live", "summary", "write_report"]

_HOME = {
    "RunProgress": "progress",
    "live": "progress",
    "comparison": "table",
    "summary": "table",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
