"""One writer at a time: leases and file locks."""
