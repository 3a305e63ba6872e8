"""Compressed vectors: the codecs, their bytes between hosts, and how they are taken apart."""
