"""DDP, FSDP2, the three parameter servers and the best of ours, side by side: `paceline bench strategies`."""
