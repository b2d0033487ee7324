"""What a run tells the outside world."""
