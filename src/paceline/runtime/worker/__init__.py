"""The worker's side of any run: what a script holds, the loader, the link to the store.

May import `messages` and `checkpoints`.
"""
