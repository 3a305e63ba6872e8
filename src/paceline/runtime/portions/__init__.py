"""A store that lies on several hosts.

May import `owner` and what is below it.
"""
