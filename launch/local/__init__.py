"""Starts and supervises the ranks of this machine, alone or as one node of many."""
