"""Which cause fits the evidence of an incident."""
