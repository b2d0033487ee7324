"""Alerts about a run: what is worth one, and delivery to a webhook, a command and e-mail."""
