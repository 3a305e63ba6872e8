"""Model and cluster in, plan out. Pure: nothing here starts a process."""
