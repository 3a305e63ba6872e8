"""What benchmarks share: processes that are timed together, records, statistics."""
