"""Workers on other hosts: the relay there, what stands for a remote worker here.

May import `messages`, `checkpoints` and `run`.
"""
