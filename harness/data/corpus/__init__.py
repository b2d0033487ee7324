"""Random access to the samples of a corpus."""
