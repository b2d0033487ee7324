"""Slurm jobs: render, submit, requeue, node health."""
