"""Tests of what a drill breaks."""
