"""What becomes of a script's optimizer: scaled, clipped, scheduled, its state fetched from the store."""
