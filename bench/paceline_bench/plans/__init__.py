"""How fast planners are, and whether their plans keep what they promise."""
