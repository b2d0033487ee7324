"""The GPU benchmark: this harness and its peers in one table."""
