"""Is this host fit for a run, and is the way to another one: what was found, and what to do about it."""
