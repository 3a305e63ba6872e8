"""Train one PyTorch model on many workers, and choose how they keep time."""
