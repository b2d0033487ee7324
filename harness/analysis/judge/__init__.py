"""The detectors over any training log."""
