"""Process groups, collectives and FSDP2."""
