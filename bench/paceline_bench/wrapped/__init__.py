"""Other systems, each wrapped once: what every benchmark that compares with one of them calls."""
