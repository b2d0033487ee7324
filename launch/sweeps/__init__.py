"""Runs the jobs of a sweep, on this machine or as a Slurm array."""
