"""Flags that several commands take, each declared once, with its help and default."""
