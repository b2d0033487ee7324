"""Detectors: pure functions of step records."""
