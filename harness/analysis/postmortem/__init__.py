"""Post-mortem of an incident: evidence from the run directory, ranked causes, remedies, Markdown and HTML reports."""
