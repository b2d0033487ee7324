"""Which samples make up which batch: index arithmetic and the ledger."""
