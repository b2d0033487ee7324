"""Checkpoints and run files in an object store: asynchronous verified upload, and the download that a resume needs."""
