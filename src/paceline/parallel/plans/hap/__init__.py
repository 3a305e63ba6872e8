"""HAP programs on real processes: operations on parts of tensors, and collectives of unequal pieces."""
