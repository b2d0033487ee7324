"""The `harness` commands, one file each."""
