"""The same, where vectors travel from worker to worker by torch.distributed."""
