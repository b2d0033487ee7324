"""Faults: what a drill breaks on purpose in a real run, and how it is put there."""
