"""Runs on Kubernetes: the manifest of a run, and the command of its pods."""
