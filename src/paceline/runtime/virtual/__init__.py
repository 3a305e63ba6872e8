"""The same run under another clock: exact simulation, and replay.

May import `owner` and what is below it.
"""
