"""Tokenizes text into an indexed corpus (`harness data prepare`)."""
