"""The page, the terminal view and the index."""
