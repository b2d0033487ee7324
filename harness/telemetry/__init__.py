"""Event log, console, heartbeat, manifest, load of the machines, picture, post-mortem process, and MLflow."""
