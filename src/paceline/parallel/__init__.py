"""Model-parallel training: what runs on a grid of workers."""
