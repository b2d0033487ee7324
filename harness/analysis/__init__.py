"""Offline tools: they read a run directory or a config, and training never imports them."""
