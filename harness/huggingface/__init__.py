"""Export to and import from Hugging Face's checkpoint layout."""
