"""The script's model in a run: its memory, its device, and what may be done to it."""
