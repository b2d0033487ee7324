"""What an incident leaves behind, and what it means: evidence, hypotheses, post-mortem, diagnosis."""
