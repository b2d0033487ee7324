"""Corpora: random access to samples from token files, embedded text or a synthetic generator."""
