"""OSDP: which operators to replicate and which to shard, so that the model fits and goes as fast as it can.

Paper: Jiang et al., "OSDP: Optimal Sharded Data Parallel for Distributed Deep Learning", IJCAI 2023.
Costs, an exact search for one batch size, a scheduler over batch sizes. Pure: a profile and a cluster in,
a plan out."""
