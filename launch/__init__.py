"""The command line, and everything that starts processes: local ranks, Slurm jobs, sweeps, drills."""
