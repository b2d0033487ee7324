"""Starts and supervises the ranks of this node."""
