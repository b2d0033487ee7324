"""The gated AdamW update and the learning-rate schedule tables."""
