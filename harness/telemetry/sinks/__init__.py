"""Sends the event log to MLflow, W&B, TensorBoard, Prometheus and alert channels, from a separate process."""
