"""The post-mortem as Markdown, HTML and figures."""
