"""Recipes whose claims are tried by training."""
