"""Report of a sweep: reads the results of its jobs, ranks them, and renders tables and pictures."""
