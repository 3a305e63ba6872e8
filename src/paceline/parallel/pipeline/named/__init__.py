"""The published pipelines by name: each is a setting of the one engine."""
