"""Protocols without a parameter store: workers exchange among themselves. One paper, one file."""
