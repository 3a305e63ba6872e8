"""What a run consists of before it begins: members, their memory, the store or the replicas.

May import `messages` and `checkpoints`.
"""
