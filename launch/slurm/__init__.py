"""Slurm jobs: render, submit, requeue, check node health."""
