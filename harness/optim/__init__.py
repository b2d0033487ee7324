"""The gated update and the schedule tables."""
