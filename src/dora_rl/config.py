"""Every knob of a run: typed, documented, its unit in its name and its limit beside it.

Owns the TOML schema and the one-line errors about it. Knows nothing of torch, Ray or vLLM, so that every
process, the core included, can read it in milliseconds. Whatever can be computed is a property, never a knob.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """The person who wrote the configuration can fix this; the message is one line and says how."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[^./\x00-\x1f][^/\x00-\x1f]*$")
    """Names the run's folder when no --run-dir is given; without "/", and not beginning with a dot."""

    seed: int = Field(0, ge=0)
    """Seeds every random choice of the run: prompts, scheduling, sampling."""

    answer_deadline_s: float = Field(1800.0, gt=0)
    """A load, publication, optimizer step or write that has not been answered after this long has failed."""

    measure_floor: bool = False
    """After the run, measure what its processes can do alone, and say how near to that the run came."""

    iterations: int = Field(10, ge=1)
    """How many batches to train. Each makes at most one new version of the weights."""


class ModelConfig(Section):
    path: str
    """A Hugging Face model folder, `package:NAME` for the GGUF file that an installed package carries, or
    `tiny:SEED` for a small random Llama made on the spot."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the engine's weights and KV cache. float32 makes engine and trainer agree to 1e-4 per token."""


class DataConfig(Section):
    source: Literal["reasoning_gym", "jsonl", "parquet", "huggingface"] = "reasoning_gym"
    """Where prompts come from."""

    path: str | None = None
    """The file (jsonl, parquet), or the folder of Parquet files or of a data set that was saved (huggingface)."""

    split: str = "train"
    """Part of a data set, when source is "huggingface"."""

    tasks: tuple[str, ...] = ()
    """Names of tasks, when source is "reasoning_gym"; each prompt draws one of them evenly."""

    worked_examples: int = Field(3, ge=0)
    """Solved problems shown as earlier chat turns before each question (reasoning_gym)."""

    prompt_column: str = "prompt"
    """Column that holds the question: text, or a list of chat messages. A dot leads into a column of mappings."""

    answer_column: str = "answer"
    """Column that holds the reference answer; rewards get it as `answer` too. A dot leads into a column of mappings
    ("reward_model.ground_truth"). "": there is none."""

    on_long_prompt: Literal["skip", "refuse"] = "skip"
    """What becomes of a prompt that is longer than rollout.max_prompt_tokens: left out and counted, or no run."""

    epochs: int = Field(0, ge=0)
    """How often a finite data set is gone through; 0 repeats it for as long as the run needs."""


class RewardConfig(Section):
    functions: tuple[str, ...] = Field(("dora_rl.rl.rewards:exact_answer",), min_length=1)
    """`module:function` each; their values are added up. f(prompts, completions, completion_ids, **columns) gives a
    number or None for each completion; functions of TRL, verl, AReaL and OpenRLHF are called as there."""

    weights: tuple[float, ...] = ()
    """One factor for each function; none: every function counts once."""

    shaping: tuple[str, ...] = ()
    """Those of the functions that shape answers (brevity, form): where the others' rewards are all equal in a group
    they count for nothing, so that it is filtered like any group from which nothing can be learned."""

    on_error: Literal["none", "stop"] = "none"
    """What a function that raises, hangs, dies or returns no number costs: its group the rewards, or the run."""

    timeout_s: float = Field(10.0, gt=0)
    """Longest that one group may take to score; a worker that takes longer is replaced and its group scored None."""

    workers: int = Field(1, ge=1)
    """Reward processes."""

    @model_validator(mode="after")
    def _refuse_repeats(self) -> "RewardConfig":
        twice = [name for name in self.functions if self.functions.count(name) > 1]
        if twice:
            raise ConfigError(f"reward.functions: {twice[0]} stands in it twice; name every function once")
        return self

    @model_validator(mode="after")
    def _refuse_shaping_without_a_task(self) -> "RewardConfig":
        unknown = [name for name in self.shaping if name not in self.functions]
        if unknown:
            raise ConfigError(f"reward.shaping: {unknown[0]} is none of reward.functions; name one of them")
        if len(set(self.shaping)) == len(self.functions):
            raise ConfigError("reward.shaping names every function; leave out the one that judges the task")
        return self

    @model_validator(mode="after")
    def _refuse_weights_of_other_functions(self) -> "RewardConfig":
        if self.weights and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"reward.weights: {len(self.weights)} numbers for {len(self.functions)} reward.functions; give one each"
            )
        if large := [weight for weight in self.weights if abs(weight) > 1e6]:
            raise ConfigError(f"reward.weights: a factor may have up to 1e+06, got {large[0]:g}; lower it")
        if self.weights and not any(self.weights):
            raise ConfigError("reward.weights: all are 0, so that no answer is better than another; raise one")
        return self


class RolloutConfig(Section):
    instances: int = Field(2, ge=1)
    """Rollout engines, each holding exactly one version at a time."""

    slots: int = Field(32, ge=1)
    """Answers that one instance generates at the same time."""

    cpus_per_instance: int = Field(1, ge=1)
    """Threads of one instance (CPU), and what Ray reserves for it."""

    gpus_per_instance: int = Field(0, ge=0)
    """GPUs of one instance; 0 runs it on the CPU."""

    tensor_parallel: int = Field(1, ge=1)
    """GPUs over which one engine splits the model."""

    max_prompt_tokens: int = Field(512, ge=2)
    """Longest prompt, chat template and worked examples included."""

    max_completion_tokens: int = Field(128, ge=1)
    """Longest answer; one that reaches it ends with finish_reason "length"."""

    temperature: float = Field(1.0, ge=0.01, le=2)
    """Of sampling; the trainer divides its logits by the same number. vLLM changes lower ones and refuses higher."""

    top_p: float = 1.0
    """Only 1: the engine would renormalise over the kept tokens and the trainer would not, which biases the ratio."""

    top_k: int = 0
    """Only 0, for the same reason."""

    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory for one instance's KV cache on the CPU."""

    kv_overcommit: float = Field(1.0, ge=1)
    """Slots for so many times the answers that would fit the KV cache at full length; most answers are short. An
    instance that comes near its limit gives answers up to others, with their KV, before the engine has to."""

    kv_pressure: float = Field(0.9, gt=0, le=1)
    """Share of the KV cache beyond which an overcommitted instance takes nothing and gives answers up."""

    kept_kv_gib: float = Field(1.0, ge=0)
    """Memory for KV of answers between two instances; beyond it, and with 0, prefixes are computed again."""

    move_timeout_s: float = Field(10.0, gt=0)
    """KV that is not there within this time, at either end of a move, is computed again."""

    block_tokens: int = Field(32, ge=1)
    """KV block; prompts are shared in whole blocks."""

    report_every_s: float = Field(2.0, gt=0)
    """How often an instance reports the tokens of its unfinished answers."""

    no_progress_s: float = Field(180.0, gt=0)
    """An answer or load that makes no progress for this long has failed; how long it may take in all has no limit."""

    @model_validator(mode="after")
    def _refuse_blocks_that_the_cpu_cannot_read(self) -> "RolloutConfig":
        if self.gpus_per_instance == 0 and self.block_tokens % 32:
            raise ConfigError(
                f"rollout.block_tokens: vLLM on the CPU takes multiples of 32, got {self.block_tokens}; choose one"
            )
        return self

    @model_validator(mode="after")
    def _refuse_truncated_sampling(self) -> "RolloutConfig":
        if self.top_p != 1.0 or self.top_k != 0:
            raise ConfigError(
                f"rollout.top_p and rollout.top_k must be 1 and 0, got {self.top_p} and {self.top_k}: the importance "
                "ratio would be biased by the probability they cut off; remove both"
            )
        return self


class ScheduleConfig(Section):
    strategy: Literal["sync", "dora", "one_step_off", "partial", "drop_stale"] = "dora"
    """`dora`: several versions generate at once, staleness bounded, nothing thrown away. What it is measured against:
    `sync`: every batch waits for its own answers. `one_step_off`: one batch is trained while the next is generated.
    `partial`: running answers go on under each new version (breaks C1). `drop_stale`: throws away what has become too
    old (breaks C2)."""

    kv: Literal["keep", "recompute"] = "keep"
    """`partial` only: whether an answer that goes on under new weights keeps the KV of the old ones."""

    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """`colocated` (sync and partial only): all devices generate, then all of them train."""

    max_staleness_versions: int = Field(2, ge=0)
    """K: a group sampled by version b is trained at a version v with v - b <= K. 0 is on-policy."""

    groups_per_iteration: int = Field(8, ge=1)
    """B: prompt groups in one batch."""

    group_size: int = Field(8, ge=2)
    """Answers per prompt; the advantage compares them with each other."""

    optimizer_steps_per_iteration: Literal[1] = 1
    """Optimizer steps on one batch."""

    ready_target_groups: int | None = Field(None, ge=1)
    """No new group is dispatched while this many are complete and without a seat; unset: groups_per_iteration.
    Every group beyond what the next batch needs only grows stale."""

    legacy_fill_versions: int = Field(1, ge=0)
    """`dora` only: an instance that is behind the newest version by at most so many still takes new groups, as far as
    the bound allows. More keeps instances fuller, less keeps groups fresher."""

    max_filtered_groups: int = Field(64, ge=1)
    """Groups in one iteration whose rewards are equal or missing, after which the batch closes short (or, empty, the
    run stops)."""

    max_attempts: int = Field(3, ge=1)
    """How often a thing that fails for reasons of infrastructure is tried before the run stops (or its group fails)."""

    @model_validator(mode="after")
    def _refuse_kv_that_no_answer_would_use(self) -> "ScheduleConfig":
        if self.kv != "keep" and self.strategy != "partial":
            raise ConfigError(
                f"schedule.kv: {self.kv} needs schedule.strategy partial, got {self.strategy!r}; in the others an "
                "answer's KV is always of its own version"
            )
        return self

    @model_validator(mode="after")
    def _refuse_what_cannot_share_devices(self) -> "ScheduleConfig":
        if self.placement == "colocated" and self.strategy not in ("sync", "partial"):
            raise ConfigError(
                f"schedule.placement: colocated needs schedule.strategy sync or partial, got {self.strategy!r}; "
                "the others train while they generate"
            )
        return self

    @property
    def promises(self) -> tuple[str, ...]:
        """Which of C1 (one version per trajectory), C2 (nothing thrown away) and C3 (bounded staleness) are kept."""
        broken = {"partial": "C1", "drop_stale": "C2"}.get(self.strategy)
        return tuple(promise for promise in ("C1", "C2", "C3") if promise != broken)

    @property
    def bound(self) -> int:
        """The staleness that the strategy promises to keep to, in versions."""
        return {"sync": 0, "one_step_off": 1}.get(self.strategy, self.max_staleness_versions)

    @property
    def batch(self) -> int:
        return self.groups_per_iteration

    @property
    def ready_target(self) -> int:
        return self.ready_target_groups or self.groups_per_iteration


class TrainConfig(Section):
    learning_rate: float = Field(1e-5, gt=0)
    """AdamW's, after warm-up."""

    warmup_iterations: int = Field(2, ge=1)
    """Iteration i (from 1) trains at learning_rate * min(1, i / warmup_iterations): never at zero."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The importance ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(0.28, gt=0)
    """The importance ratio is clipped above at 1 + clip_high."""

    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this L2 norm."""

    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""

    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens in one forward and backward pass; a single group may exceed it and then goes alone."""

    share_prefix: bool = True
    """Compute a group's prompt once for all its members."""

    ranks: Literal[1] = 1
    """Trainer processes."""

    threads: int = Field(2, ge=1)
    """Threads of one trainer rank on the CPU."""


class EvalConfig(Section):
    every_iterations: int = Field(0, ge=0)
    """Score the held-out prompts after every so many iterations; 0: only before the first and after the last."""

    prompts: int = Field(0, ge=0)
    """Held-out prompts, each answered once as in training and once greedily; 0: no evaluation."""


class CheckpointConfig(Section):
    every_iterations: int = Field(0, ge=0)
    """Weights and optimizer go to the run's folder after so many iterations; 0: never."""

    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay."""


class AuditConfig(Section):
    keep_versions: int = Field(4, ge=1)
    """Weights of the last so many versions stay in the run's folder."""


class PaceConfig(Section):
    """Paced emulation: every duration comes from one law, and answers have forced lengths."""

    decode_step_s: float = Field(0.03, gt=0, le=3600)
    """One decode step of an instance..."""

    decode_answer_s: float = Field(0.0, ge=0, le=3600)
    """...and what every answer that runs on it adds."""

    prefill_token_s: float = Field(0.0, ge=0, le=3600)
    """One token of a prefix that has to be computed; the instance does nothing else meanwhile."""

    train_token_s: float = Field(0.001, gt=0, le=3600)
    """One trained token on one trainer device."""

    trainer_devices: int = Field(1, ge=1, le=4096)
    """Devices that share the trainer's work."""

    step_s: float = Field(0.0, ge=0, le=3600)
    """The optimizer step."""

    publish_s: float = Field(0.0, ge=0, le=3600)
    """From the optimizer step to weights that instances can load."""

    load_s: float = Field(0.0, ge=0, le=3600)
    """One instance's change of version."""

    move_s: float = Field(0.0, ge=0, le=3600)
    """Keeping or loading an answer's KV: fixed part..."""

    move_token_s: float = Field(0.0, ge=0, le=3600)
    """...and per token of its prefix."""

    prompt_tokens: int = Field(64, ge=1, le=10**6)
    """Length of every prompt, for the simulator; real prompts should be about as long."""

    length_mean: float = Field(40.0, gt=0, le=1e6)
    """Mean answer length in tokens, before the cut."""

    length_sigma: float = Field(0.99, ge=0, le=5)
    """Of the lognormal distribution of lengths."""

    length_cut: float = Field(12.5, gt=0, le=1e6)
    """Longest answer, in means."""

    early_training: bool = True
    """Whether the trainer computes a group when it takes its seat, or all of them when the batch is full."""


def _in_place(pace: PaceConfig) -> PaceConfig:
    """Of answers that stay where they are: nothing is carried."""
    return pace.model_copy(update={"move_s": 0.0, "move_token_s": 0.0})


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    audit: AuditConfig = AuditConfig()
    pace: PaceConfig | None = None

    @property
    def law(self) -> PaceConfig | None:
        """[pace], as it holds for the strategy: where answers go on under new weights their KV stays where it is."""
        return self.pace if self.pace is None or "C1" in self.schedule.promises else _in_place(self.pace)

    @property
    def trainer_devices(self) -> int:
        """Devices of the trainer that are not instances' too."""
        if self.schedule.placement == "colocated":
            return 0
        return self.train.ranks if self.pace is None else self.pace.trainer_devices

    @property
    def max_model_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file and apply `section.key=VALUE` overrides.

    Raises ConfigError, one line, when the file is missing, is not TOML, or holds an unknown or ill-typed key.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name an existing TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> Config:
    """Validate a nested mapping. Raises ConfigError about its first fault."""
    try:
        return Config.model_validate(_with_tuples(raw))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def dump_config(config: Config) -> str:
    """The configuration as TOML, every value spelled out."""
    lines: list[str] = []
    for section, values in config.model_dump(exclude_none=True).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def config_hash(config: Config) -> str:
    """Of the configuration as `dump_config` spells it out: what a run's config.toml holds."""
    return text_hash(dump_config(config))


def text_hash(text: str) -> str:
    """SHA-256, shortened to 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"--set takes section.key=VALUE, got {override!r}; for example --set run.seed=1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} must be a section ([{section}]), got {table!r}; move it under its section")
    table[name] = value


def _with_tuples(value: Any) -> Any:
    """TOML has arrays, the schema has (immutable) tuples."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for one control character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _explain(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        *section, name = (str(part) for part in fault["loc"])
        known = _known_keys(section)
        nearest = difflib.get_close_matches(name, [*known, *map(_initials, known)], n=1, cutoff=0.0)
        nearest = [key for key in known if nearest and nearest[0] in (key, _initials(key))][:1]
        kind = "setting" if section else "section"
        return f"unknown {kind} {where}; did you mean {'.'.join([*section, *nearest])}?"
    if fault["type"] == "missing":
        return f"{where} is required and missing; add it to the configuration"
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    if fault["type"] == "tuple_type":
        return f"{where}: should be a list, got {fault['input']!r}; write [{_toml_value(fault['input'])}]"
    return f"{where}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {fault['input']!r}"


def _initials(key: str) -> str:
    return "".join(word[0] for word in key.split("_"))


def _known_keys(section: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for name in section:
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
