"""Text to an indexed corpus."""
