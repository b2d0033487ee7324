"""The policy: a pure fold of the event log into actions."""
