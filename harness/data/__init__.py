"""Data as arithmetic: (seed, batch index, ledger) -> tokens."""
