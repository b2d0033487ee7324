"""Process groups, collectives, FSDP2, and host memory that a GPU copies into."""
