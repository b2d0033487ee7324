"""Drills: a run with injected faults, its clean twin, and the score card."""
