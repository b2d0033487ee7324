"""Tests of evidence, hypotheses, post-mortem and diagnosis."""
