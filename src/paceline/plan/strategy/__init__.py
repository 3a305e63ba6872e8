"""Which way to train in parallel: replicas, shards or a parameter store, by profile and limits."""

from paceline.plan.strategy.advice import Advice, Constraints, advise

__all__ = ["Advice", "Constraints", "advise"]
