"""Protocols with a store in the middle. One paper, one file."""
