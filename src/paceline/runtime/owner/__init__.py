"""The process that decides: it holds the store, or the place where peers meet.

May import all but `portions` and `virtual`.
"""
