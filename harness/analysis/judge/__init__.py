"""Replays the sentinel's detectors over any training log."""
