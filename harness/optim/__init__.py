"""The gated update by AdamW and Muon, and the learning-rate schedule tables."""
