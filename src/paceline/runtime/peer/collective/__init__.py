"""The fabric whose vectors travel from worker to worker by torch.distributed: its carrier and link."""
