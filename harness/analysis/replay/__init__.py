"""Replay: a guilty step once more, from the state it was made on, to tell hardware from data."""
