"""Pretraining of language models: training loop, sentinel, checkpoints, and the tools that read a run."""
