"""A run's state on disk while it goes on, and where random number generators stand.

Imports nothing else of `runtime`.
"""
