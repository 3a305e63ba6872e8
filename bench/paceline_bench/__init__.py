"""Measured comparisons: us and the other system in the same run, in turns, as ratios.

A figure that was measured on another day, on another machine or alone says little. So every
benchmark here runs both sides at once, lets them work in alternating blocks (ABAB...), checks the
world size that each side really had, and keeps what it saw as a record with its date.
"""
