"""Runs drills: the victim, its twin, and the environment a fault needs."""
