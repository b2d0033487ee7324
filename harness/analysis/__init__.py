"""Offline tools that read a run directory or a config. Training never imports them."""
