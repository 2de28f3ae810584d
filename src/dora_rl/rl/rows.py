"""Rows of a data set from disk: JSONL, Parquet, and what Hugging Face's libraries leave behind. Reads, never executes.

Every row is checked when it is read, so that the first wrong one is named, with its place, before anything starts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dora_rl.rl.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose turns chat templates know."""

RESERVED = ("prompts", "completions", "completion_ids")
"""Names that a reward function already uses; a column cannot have them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row, checked."""

    name: str
    """For ever the same, whatever else the data hold: `line-7`, `row-7`."""
    messages: tuple[Mapping[str, str], ...]
    columns: Mapping[str, Any]
    is_chat: bool

    @property
    def content(self) -> str:
        """What makes two rows the same question; white space does not tell them apart."""
        return json.dumps([[turn["role"], " ".join(turn["content"].split())] for turn in self.messages])


def read_rows(source: str, path: Path, split: str, prompt_column: str, answer_column: str | None) -> list[Row]:
    """Read every row. Raises DataError with the place of the first that is wrong."""
    records = {"jsonl": _jsonl, "parquet": _parquet, "huggingface": _huggingface}[source](path, split)
    rows = [_row(where, name, record, prompt_column, answer_column) for where, name, record in records]
    if not rows:
        raise DataError(f"{path} has no rows; name a file that has some in data.path")
    return rows


GZIP = b"\x1f\x8b"
"""How a compressed file begins."""

Record = tuple[str, str, Any]
"""Where it stands, for people; its name; the row."""


def _jsonl(path: Path, split: str) -> Iterator[Record]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; data.path must name a JSONL file") from error
    except UnicodeDecodeError as error:
        if error.object[:2] == GZIP:
            raise DataError(f"{path} is compressed; unpack it and name the unpacked file in data.path") from error
        place = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {place}: not UTF-8 text; save the file as UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, f"line-{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not valid JSON ({error}); write one JSON object a line") from error


def _parquet(path: Path, split: str) -> Iterator[Record]:
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no *.parquet file in it; name a Parquet file or a folder of some in data.path")
    yield from _numbered((file, _parquet_batches(file)) for file in files)


def _huggingface(path: Path, split: str) -> Iterator[Record]:
    """A data set that was saved to disk, with splits or without, or a hub's folder of Parquet files."""
    if not path.is_dir():
        raise DataError(f"data.path: {path} is no folder; name the folder of a saved data set")
    splits = _json(path / "dataset_dict.json")
    if splits is not None:
        known = splits.get("splits") if isinstance(splits, dict) else None
        if not isinstance(known, list) or split not in known:
            raise DataError(f"{path} has the splits {known}, not {split!r}; set data.split to one of them")
        path = path / split
    state = _json(path / "state.json")
    if state is not None:
        files = [path / name for name in _names_in(state, path, split)]
        yield from _numbered((file, _arrow_batches(file)) for file in files)
        return
    files = [file for file in sorted(path.rglob("*.parquet")) if file.name.split("-")[0].split(".")[0] == split]
    if not files:
        raise DataError(
            f"{path} is no saved data set (no state.json) and has no {split}*.parquet in it; name a folder that "
            "save_to_disk has written, or set data.split"
        )
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        raise DataError(f"{path} holds several data sets, in {', '.join(folders)}; name one of them in data.path")
    yield from _numbered((file, _parquet_batches(file)) for file in files)


def _names_in(state: Any, path: Path, split: str) -> list[str]:
    """The files that a saved data set's state.json names."""
    found = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(found, list) or not all(isinstance(file, dict) and "filename" in file for file in found):
        raise DataError(f"{path}/state.json names no files; save the data set again")
    if (holds := state.get("_split")) not in (None, split):
        raise DataError(f"{path} holds the split {holds!r}, not {split!r}; set data.split to it or name another folder")
    return [Path(str(file["filename"])).name for file in found]


def _numbered(files: Iterable[tuple[Path, Iterator[pa.RecordBatch]]]) -> Iterator[Record]:
    """Rows are counted through all files, from 1."""
    number = 0
    for file, batches in files:
        try:
            for batch in batches:
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", f"row-{number}", record
        except FileNotFoundError as error:
            raise DataError(f"there is no {file}; name an existing file") from error
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file} is damaged, or not what data.source says: {_one_line(error)}") from error
        except (ValueError, OverflowError) as error:
            raise DataError(
                f"{file} has a value that cannot be read: {_one_line(error)}; leave its column out"
            ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _parquet_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as opened:
        yield from opened.iter_batches()


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(file)) as opened, pa.ipc.open_stream(opened) as reader:
        yield from reader


def _json(path: Path) -> Any:
    """What the file holds; None when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}; save the data set again") from error


# --- one row ---------------------------------------------------------------------------------------------------------


def _row(where: str, name: str, record: Any, prompt_column: str, answer_column: str | None) -> Row:
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}; write one object a line")
    prompt = _lookup(where, record, "prompt_column", prompt_column)
    taken = [column for column in RESERVED if column in record and column != prompt_column]
    if taken:
        raise DataError(f'{where}: column "{taken[0]}" is a name that reward functions use; rename it')
    columns = {column: value for column, value in record.items() if column != prompt_column}
    if answer_column is not None:
        answer = _lookup(where, record, "answer_column", answer_column)
        # What is missing is null, nothing, or (from a data frame) the one number that is not equal to itself.
        if answer is None or answer != answer or (isinstance(answer, str) and not answer.strip()):
            raise DataError(f'{where}: column "{answer_column}" is empty; fill it in or set data.answer_column')
        columns["answer"] = answer
    messages = _messages(where, prompt_column, prompt)
    try:
        "".join(turn["content"] for turn in messages).encode()
    except UnicodeEncodeError as error:
        raise DataError(f'{where}: column "{prompt_column}" is no Unicode text ({error.reason}); mend it') from error
    return Row(name, messages, columns, is_chat=not isinstance(prompt, str))


def _lookup(where: str, record: Mapping[str, Any], setting: str, column: str) -> Any:
    """A column's value, or what lies in a column of mappings under the names behind its dots."""
    value: Any = record
    if column in record:
        return record[column]
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(
                f'{where}: no column "{column}", only {sorted(map(str, record))}; set data.{setting} or add the column'
            )
        value = value[name]
    return value


def _messages(where: str, column: str, value: Any) -> tuple[Mapping[str, str], ...]:
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if isinstance(value, list) and value and all(_is_turn(turn) for turn in value):
        for turn in value:
            if turn["role"] not in ROLES:
                raise DataError(
                    f'{where}: column "{column}" has a turn of {turn["role"]!r}; name one of {", ".join(ROLES)}'
                )
            if turn.get("tool_calls"):
                raise DataError(f'{where}: column "{column}" has a turn with tool_calls, of which nothing is made here')
        if value[-1]["role"] == "assistant":
            raise DataError(f'{where}: column "{column}" ends with an answer; end it with a turn to be answered')
        return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)
    wanted = 'text or a list of {"role": ..., "content": ...}'
    raise DataError(f'{where}: column "{column}" must be {wanted}, got {json.dumps(value, default=str)[:60]}')


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
