"""Protocols without a middle. One paper, one file."""
