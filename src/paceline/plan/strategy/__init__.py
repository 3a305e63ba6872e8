"""Which way to train in parallel: replicas, shards or a parameter store, by profile and limits."""

from paceline.plan.strategy.advice import Constraints, StrategyAdvice, advise

__all__ = ["Constraints", "StrategyAdvice", "advise"]
