"""Faults of the other end of a wire."""


class RemoteError(RuntimeError):
    """Another process did not do its part: it died, fell silent or sent damaged bytes. The message is one line."""
