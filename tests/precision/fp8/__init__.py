"""Tests of fp8 that need no GPU."""
