"""Actor-critic agents that people can run, trust and read."""
