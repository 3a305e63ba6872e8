"""The worker's side of a run without a store.

May import `worker` and what is below it.
"""
