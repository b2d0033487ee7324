"""Decision tree that diagnoses a training run from its step records."""
