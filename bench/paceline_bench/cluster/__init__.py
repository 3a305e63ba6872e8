"""Time to accuracy on several hosts of a testbed, against DDP."""
