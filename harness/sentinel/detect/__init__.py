"""Detectors: pure functions of step records, without torch."""
