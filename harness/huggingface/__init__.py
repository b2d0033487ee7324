"""Exports models to, and imports models from, Hugging Face's safetensors layout."""
