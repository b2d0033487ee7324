"""Sends the event log to MLflow from a separate process."""
