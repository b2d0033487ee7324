"""Sends the event log to MLflow, from a process of its own."""
