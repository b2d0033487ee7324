"""What many runs of one sweep come to: read from their directories, ranked, drawn and written down."""
