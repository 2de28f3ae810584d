"""Whose fault: the two errors of this package. One line each, and both name the way out."""


class DataError(ValueError):
    """The person who wrote the configuration or the data file can fix this."""


class RewardError(ValueError):
    """The author of a reward function, or of the data it reads, can fix this."""
