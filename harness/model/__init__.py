"""The transformer, its loss, its parameter table and its size."""
