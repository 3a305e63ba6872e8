"""Benchmarks of one thing each: an exchange, a store, a death, a trace."""
