"""dora-rl: reinforcement learning for reasoning models that never waits for the longest answer."""

__version__ = "0.1.0"
