"""Tests of drills: scenarios, scores, cards, campaigns."""
