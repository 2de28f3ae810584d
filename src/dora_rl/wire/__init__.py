"""Bytes between processes and on disk; both ends of a wire stand in one file."""
