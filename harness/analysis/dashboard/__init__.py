"""What a person looks at: a page of one run, a live view in the terminal, an index over many runs."""
