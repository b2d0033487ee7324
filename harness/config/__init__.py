"""The typed config tree, and Hydra that composes it. No torch."""
