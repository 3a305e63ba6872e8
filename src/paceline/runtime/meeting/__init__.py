"""The owner's side of a run without a store: where peers meet.

May import `run`, `hosts` and what is below them.
"""
