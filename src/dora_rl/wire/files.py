"""Files as others expect them: readable like any, and on the disk when something says so."""

import os
from collections.abc import Iterable
from pathlib import Path


def readable_like_others(paths: Iterable[Path]) -> None:
    """safetensors makes its files readable for nobody else; give them the mode that any new file has."""
    umask = os.umask(0)
    os.umask(umask)
    for path in paths:
        path.chmod(0o666 & ~umask)


def flush(path: Path) -> None:
    """A rename may overtake the data it names unless the data is on the disk first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
