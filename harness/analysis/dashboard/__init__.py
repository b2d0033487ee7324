"""Dashboards of runs: an HTML page of one run, a live terminal view, an index of many runs."""
