"""Drills: a run with a fault, its clean twin, and the card that says how the run answered."""
