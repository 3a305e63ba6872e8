"""What a worker computes on: loaders, the order of samples, rows that an engine hands over."""
