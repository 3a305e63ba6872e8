"""A lone worker: plain PyTorch, with the books kept beside it.

May import `worker` and what is below it.
"""
