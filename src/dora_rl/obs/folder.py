"""The names in a run's folder, and the files in it that grow line by line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunFolder:
    """Where everything of one run lies. Creates nothing until `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.journal = path / "journal.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.eval = path / "eval.jsonl"
        self.open_db = path / "open.db"
        self.rollouts = path / "rollouts"
        self.weights = path / "weights"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"

    def create(self, config_toml: str) -> None:
        """Make the folder and write the configuration. Raises FileExistsError when it is there and not empty."""
        self.path.mkdir(parents=True, exist_ok=True)
        if any(self.path.iterdir()):
            raise FileExistsError(f"{self.path} is not empty")
        with self.config.open("x", encoding="utf-8") as file:
            file.write(config_toml)
        self.rollouts.mkdir()

    def iteration_file(self, iteration: int) -> Path:
        return self.rollouts / f"{iteration}.parquet"

    def version_folder(self, version: int) -> Path:
        return self.weights / str(version)

    def append_metrics(self, line: Mapping[str, object]) -> None:
        _append(self.metrics, line)

    def append_eval(self, line: Mapping[str, object]) -> None:
        _append(self.eval, line)

    def read_metrics(self) -> list[dict[str, Any]]:
        return _lines(self.metrics)

    def read_eval(self) -> list[dict[str, Any]]:
        return _lines(self.eval)


def _append(path: Path, line: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError with the number of a line that is not JSON. A file that is not there has no lines yet."""
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}; remove or restore the line") from error
    return lines
