"""HAP: how to cut a model over unequal devices, as a synthesized program and sharding ratios."""
