"""Starts processes: the command line and its targets."""
