"""Put into PYTHONPATH for the processes of a mutant."""
