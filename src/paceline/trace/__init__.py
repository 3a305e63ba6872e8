"""The one record of a run: typed events, how they are written and read, and what they add up to."""

from __future__ import annotations

from paceline.trace import events
from paceline.trace.files import TraceTail, TraceWriter, read_trace
from paceline.trace.lasting import LastingTrace
from paceline.trace.tally import Result, Tally, tally

__all__ = ["LastingTrace", "Result", "Tally", "TraceTail", "TraceWriter", "events", "read_trace", "tally"]
