"""Shared by tests that start other people's processes."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leftovers_collected() -> Iterator[None]:
    """Ray and vLLM leave open files and sockets to the garbage collector, which says so: here, not in a later test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()
