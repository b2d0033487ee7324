"""Evaluates checkpoints of a run with lm-evaluation-harness, in a process beside training."""
