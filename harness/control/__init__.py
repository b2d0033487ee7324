"""Stop requests and operator commands, from the outside to a running loop."""
