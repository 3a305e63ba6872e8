"""The staleness advisor: how stale may gradients be, and what to do about it.

From Python:

    observed = from_run(Path("runs/latest"))  # or from_cluster(load_cluster("spot.toml"), "spot.toml")
    land = landscape(request := Request(lr=0.1, curvature=10.0, noise=1.0))
    advice = advise(observed, land, request)
    advice.learning_rate.critical, advice.best, advice.now.margin
"""

from __future__ import annotations

from paceline.plan.staleness.advice import Advice, advise
from paceline.plan.staleness.arrivals import Flow, WorkerSet
from paceline.plan.staleness.delays import Constant, Gamma, Mixture, Samples, ShiftedExponential
from paceline.plan.staleness.floor import floor_factor
from paceline.plan.staleness.landscape import Fact, Landscape, Request, landscape
from paceline.plan.staleness.observe import Observed, from_cluster, from_run
from paceline.plan.staleness.outlook import Direction, Outlook, predict
from paceline.plan.staleness.policies import PolicyStep, best, group_survey, learning_rates, lockstep, survey
from paceline.plan.staleness.roots import critical_load, decay, dominant_root
from paceline.plan.staleness.thresholds import best_threshold, thresholds

__all__ = [
    "Advice",
    "Constant",
    "Direction",
    "Fact",
    "Flow",
    "Gamma",
    "Landscape",
    "Mixture",
    "Observed",
    "Outlook",
    "PolicyStep",
    "Request",
    "Samples",
    "ShiftedExponential",
    "WorkerSet",
    "advise",
    "best",
    "best_threshold",
    "critical_load",
    "decay",
    "dominant_root",
    "floor_factor",
    "from_cluster",
    "from_run",
    "group_survey",
    "landscape",
    "learning_rates",
    "lockstep",
    "predict",
    "survey",
    "thresholds",
]
