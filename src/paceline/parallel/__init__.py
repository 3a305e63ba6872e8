"""A model split over a mesh of workers: one axis repeats it, the others split it."""
