"""The decision tree for a run that misbehaves."""
