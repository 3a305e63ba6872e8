"""Pipelines: seconds per batch against theory and torch's schedules, and samples to an accuracy."""
