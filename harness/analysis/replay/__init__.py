"""Replays a guilty step from the state it started from, to distinguish hardware faults from bad data."""
