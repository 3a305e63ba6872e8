"""Running sharding plans on real processes, and measuring what planners need to know."""
