"""A pretraining harness whose runs survive."""
