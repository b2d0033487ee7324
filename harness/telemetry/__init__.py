"""Event log, console, heartbeat, manifest, picture, post-mortem process, and MLflow."""
