"""Checkpoints: files, folders, and how they are replaced safely."""
