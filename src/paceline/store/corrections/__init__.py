"""Corrections for gradients that come late: one rule per file, none of which knows a protocol."""
