"""What all other packages share: events, run state, the run directory, processes. No torch."""
