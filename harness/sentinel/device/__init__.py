"""What the sentinel computes on the GPU, without a host sync."""
