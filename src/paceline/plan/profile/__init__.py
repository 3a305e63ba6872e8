"""What planners read: a model's profile and a cluster's profile, as files that people can write by hand."""

from paceline.plan.profile.cluster import ClusterProfile, Device, TransferCost, load_cluster_profile
from paceline.plan.profile.model import ModelProfile, Operator, load_model_profile

__all__ = [
    "ClusterProfile",
    "Device",
    "ModelProfile",
    "Operator",
    "TransferCost",
    "load_cluster_profile",
    "load_model_profile",
]
