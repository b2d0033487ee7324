"""Health of a node: what its driver and kernel report, GEMMs with a known result, and links to other nodes."""
