"""Bad inputs, as somebody would make them, and the line that `dora-rl train` answers; docs/errors.md is made of them.

Every one must be met before an engine starts: one line on the error stream, exit status 2, no run folder left behind.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE_S = 300

BASE = """[run]
iterations = 2
[model]
path = "tiny:0"
[data]
source = "jsonl"
path = "data.jsonl"
[reward]
functions = ["dora_rl.rl.rewards:digit_share"]
[rollout]
kv_cache_gib = 0.1
max_prompt_tokens = 64
max_completion_tokens = 32
"""

GOOD = '{"prompt": "Two and two?", "answer": "4"}\n'


@dataclass(frozen=True, slots=True)
class BadInput:
    what: str
    sets: Sequence[str] = ()
    config: str | None = BASE
    """The configuration's text; None: there is no such file."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Beside the configuration, over good ones."""
    arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    lines: Sequence[str]
    """Of the error stream."""
    run_left: bool
    """Whether something lies where the run would have been."""

    @property
    def good(self) -> bool:
        return self.status == 2 and len(self.lines) == 1 and not self.run_left


def _rows(*bad: str) -> dict[str, str | bytes]:
    return {"data.jsonl": GOOD + "".join(line + "\n" for line in bad)}


def _set(what: str, *sets: str) -> BadInput:
    return BadInput(what, sets)


def _data(what: str, files: Mapping[str, str | bytes], *sets: str) -> BadInput:
    return BadInput(what, sets, files=files)


BAD_INPUTS: Sequence[BadInput] = (
    # The configuration
    BadInput("no such file", config=None),
    BadInput("no TOML", config="[run\n"),
    BadInput("no model", config="[run]\niterations = 1\n"),
    BadInput("a section that is a value", config="run = 1\n" + BASE.replace("[run]\niterations = 2\n", "")),
    _set("a misspelt setting", "schedule.max_stalenes=1"),
    _set("a misspelt section", "shedule.strategy=dora"),
    _set("--set without a value", "run.seed"),
    _set("--set without a section", "seed=1"),
    _set("K below 0", "schedule.max_staleness_versions=-1"),
    _set("a group of 1", "schedule.group_size=1"),
    _set("no groups", "schedule.groups_per_iteration=0"),
    _set("an unknown strategy", "schedule.strategy=fast"),
    _set("KV of other versions where there is none", "schedule.kv=recompute"),
    _set("dora on shared devices", "schedule.placement=colocated"),
    _set("no iterations", "run.iterations=0"),
    _set("a word for a number", "run.iterations=ten"),
    _set("text for a number", 'run.seed="7"'),
    _set("a name that leads out of runs/", "run.name=../other"),
    _set("a seed below 0", "run.seed=-1"),
    _set("temperature 0", "rollout.temperature=0"),
    _set("a temperature that no engine takes", "rollout.temperature=5"),
    _set("top-p", "rollout.top_p=0.9"),
    _set("top-k", "rollout.top_k=50"),
    _set("a block that the CPU cannot read", "rollout.block_tokens=7"),
    _set("answers of no length", "rollout.max_completion_tokens=0"),
    _set("answers longer than the model reads", "rollout.max_completion_tokens=1000000"),
    _set("a KV cache that holds no whole answer", "rollout.kv_cache_gib=0.0001"),
    _set("no instances", "rollout.instances=0"),
    _set("a learning rate of 0", "train.learning_rate=0"),
    _set("an infinite learning rate", "train.learning_rate=inf"),
    _set("a clip beyond 1", "train.clip_low=1.5"),
    _set("two trainer ranks", "train.ranks=2"),
    _set("an evaluation every -1 iterations", "eval.every_iterations=-1"),
    # What the machine has
    _set("more instances than cores can serve", "rollout.instances=1000"),
    _set("more threads than cores", "train.threads=4096"),
    _set("an engine with more threads than cores", "rollout.cpus_per_instance=4096"),
    _set("more memory than there is", "rollout.kv_cache_gib=100000"),
    _set("GPUs that are not there", "rollout.gpus_per_instance=64"),
    # The model
    _set("a model that is not there", "model.path=nowhere"),
    _set("a tiny model without a number", "model.path=tiny:x"),
    _set("a package that is not installed", "model.path=package:no_such_package"),
    _set("a folder that is no model", "model.path=."),
    _data("a model without weights", {"model/config.json": '{"model_type": "llama"}'}, "model.path=model"),
    _data("a model of a kind that nobody knows", {"model/config.json": '{"model_type": "?"}'}, "model.path=model"),
    # The data
    _set("an unknown kind of data", "data.source=csv"),
    _set("no data", "data.path=nowhere.jsonl"),
    BadInput("data without a path", config=BASE.replace('path = "data.jsonl"\n', "")),
    _set("a folder for a file", "data.path=."),
    _data("data without rows", {"data.jsonl": "\n\n"}),
    _data("a line that is no JSON", _rows('{"prompt": ')),
    _data("a line that is no object", _rows('["prompt"]')),
    _data("a row without a prompt", _rows('{"answer": 1}')),
    _data("a row without an answer", _rows('{"prompt": "?"}')),
    _data("an empty prompt", _rows('{"prompt": " ", "answer": 1}')),
    _data("an empty answer", _rows('{"prompt": "?", "answer": ""}')),
    _data("a chat without content", _rows('{"prompt": [{"role": "user"}], "answer": 1}')),
    _data(
        "a chat that has been answered",
        _rows('{"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], "answer": 1}'),
    ),
    _data("an answer that is no number", _rows('{"prompt": "?", "answer": NaN}')),
    _data(
        "a chat with a role that nobody knows",
        _rows('{"prompt": [{"role": "human", "content": "?"}], "answer": 1}'),
    ),
    _data("half a character", _rows('{"prompt": "\\ud800", "answer": 1}')),
    _data("compressed data", {"data.jsonl": gzip.compress(GOOD.encode())}),
    _data("a column that rewards use", _rows('{"prompt": "?", "answer": 1, "completions": 2}')),
    _data("data that are no text", {"data.jsonl": GOOD.encode() + b'{"prompt": "\xff"}\n'}),
    _set("prompts that are all too long", "rollout.max_prompt_tokens=2"),
    _data(
        "a long prompt that is not to be left out",
        _rows(json.dumps({"prompt": "word " * 200, "answer": 1})),
        "data.on_long_prompt=refuse",
    ),
    _set("another name for the answer", "data.answer_column=solution"),
    _set("more held-out prompts than rows", "eval.prompts=5"),
    _data("a Parquet file that is none", {"data.parquet": "rows"}, "data.source=parquet", "data.path=data.parquet"),
    _set("a folder that is no data set", "data.source=huggingface", "data.path=."),
    _data(
        "a saved data set that is another split",
        {"saved/state.json": '{"_data_files": [{"filename": "data.arrow"}], "_split": "test"}'},
        "data.source=huggingface",
        "data.path=saved",
    ),
    _data(
        "a saved data set that names no files",
        {"saved/state.json": '{"_data_files": null}'},
        "data.source=huggingface",
        "data.path=saved",
    ),
    _data(
        "a split that the data set has not",
        {"saved/dataset_dict.json": '{"splits": ["test"]}'},
        "data.source=huggingface",
        "data.path=saved",
    ),
    _set("no tasks", "data.source=reasoning_gym"),
    _set("an unknown task", "data.source=reasoning_gym", "data.tasks=['letter_countin']"),
    # The reward
    _set("no reward", "reward.functions=[]"),
    _set("a reward without a module", "reward.functions=['score']"),
    _set("a reward whose module is not there", "reward.functions=['no_such_module:score']"),
    _set("a reward that its module has not", "reward.functions=['dora_rl.rl.rewards:scores']"),
    _data("a reward whose module raises", {"mine.py": "1 / 0\n"}, "reward.functions=['mine:score']"),
    _set("a file for a reward's module", "reward.functions=['mine.py:score']"),
    _data(
        "a reward that wants what nobody has",
        {"mine.py": "def score(completions, difficulty, **columns): return [0.0] * len(completions)\n"},
        "reward.functions=['mine:score']",
    ),
    _data(
        "an async reward",
        {"mine.py": "async def score(completions, **columns): return [0.0] * len(completions)\n"},
        "reward.functions=['mine:score']",
    ),
    _set("one reward twice", "reward.functions=['a:b', 'a:b']"),
    _set("two weights for one reward", "reward.weights=[1.0, 2.0]"),
    _set("rewards that count for nothing", "reward.weights=[0.0]"),
    _set("no time for a reward", "reward.timeout_s=0"),
    # The run's folder
    BadInput("a folder that holds a run", files={"taken/journal.jsonl": "{}\n"}, arguments=("--run-dir", "taken")),
    BadInput("a file for a folder", files={"taken": ""}, arguments=("--run-dir", "taken")),
    BadInput("a folder whose name is too long", arguments=("--run-dir", "x" * 300)),
    BadInput("a folder in a file", files={"taken": ""}, arguments=("--run-dir", "taken/run")),
)


def ask(bad: BadInput, folder: Path) -> Answer:
    """What `dora-rl train` says to it, in a new folder."""
    folder.mkdir(parents=True)
    for name, content in {"data.jsonl": GOOD * 3, **bad.files}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    if bad.config is not None:
        (folder / "run.toml").write_text(bad.config, encoding="utf-8")
    sets = [part for setting in bad.sets for part in ("--set", setting)]
    where = () if "--run-dir" in bad.arguments else ("--run-dir", "run")
    done = subprocess.run(
        [sys.executable, "-m", "dora_rl.cli", "train", "run.toml", *where, *bad.arguments, *sets],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder.resolve())},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    return Answer(done.returncode, [line for line in done.stderr.splitlines() if line], (folder / "run").exists())


def page(asked: Sequence[tuple[BadInput, Answer]]) -> str:
    """`docs/errors.md`."""
    lines = [
        "# What `dora-rl train` answers to bad input",
        "",
        "Each of these was run; each ends with exit status 2 and this line, before any engine starts. The page is made",
        "by `make accept STEP=3`.",
        "",
        "| input | answer |",
        "|---|---|",
    ]
    lines += [f"| {_input(bad)} | {_cell(' '.join(answer.lines))} |" for bad, answer in asked]
    return "\n".join(lines) + "\n"


def _input(bad: BadInput) -> str:
    how = ", ".join(f"`{setting}`" for setting in bad.sets)
    return _cell(f"{bad.what}: {how}" if how else bad.what)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
