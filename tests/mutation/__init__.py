"""Mutation testing: changes one expression at a time and counts the changes that no test notices."""
