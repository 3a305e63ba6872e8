"""Protocols with a parameter store. One paper, one file."""
