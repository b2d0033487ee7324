"""What every step tells, and the gate that may refuse an update."""
