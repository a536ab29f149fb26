"""Measurements: operators, cost of a cut, memory, start-up."""
