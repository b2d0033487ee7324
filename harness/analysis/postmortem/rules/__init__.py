"""Rules that score the possible causes of an incident against its evidence."""
