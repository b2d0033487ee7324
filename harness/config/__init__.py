"""The typed config tree, and its composition with Hydra. No torch."""
