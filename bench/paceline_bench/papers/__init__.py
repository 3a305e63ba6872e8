"""The headline claims of the papers that Paceline follows, each with a recipe that tries it here.

What counts as reproduced stands in the recipe as data, and is decided before anything runs.
"""
