"""What processes of a run say to each other: typed, small, without tensors.

Imports nothing else of `runtime`.
"""
