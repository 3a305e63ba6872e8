"""Whether the simulator tells the truth: its samples/s against those of a testbed."""
