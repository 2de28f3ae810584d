"""`audit_run`: everything the judge does with a run's folder, in order."""

from collections import Counter
from pathlib import Path

from dora_rl.audit.checks import (
    Limits,
    check_beside,
    check_bound,
    check_ledger,
    check_rows,
    read_open,
    read_stored,
    staleness_of,
)
from dora_rl.audit.history import AuditError, History
from dora_rl.audit.report import Report
from dora_rl.config import Config, ConfigError, load_config, text_hash


def audit_run(folder: Path, recompute: int = 0) -> Report:
    """Judge a run's folder. Raises AuditError when it has no journal or no configuration that can be read.

    `recompute`: score so many trajectories again under the kept weights; needs torch, the rest does not.
    """
    if not (folder / "journal.jsonl").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/journal.jsonl"))
        hint = f"runs in it: {', '.join(inside)}" if inside else "name the folder that dora-rl train has printed"
        raise AuditError(f"{folder} is no run's folder (no journal.jsonl in it); {hint}")
    try:
        config = load_config(folder / "config.toml")
    except ConfigError as error:
        raise AuditError(str(error)) from error
    history = History(folder / "journal.jsonl")
    report = Report(notes=list(history.notes))
    # Of the file as it stands: a later program may know more settings than the one that wrote it.
    found = text_hash((folder / "config.toml").read_text(encoding="utf-8"))
    if found != history.header.config_hash:
        report.problems.append(
            f"config.toml has hash {found}, the journal says {history.header.config_hash}: "
            "the bound that was promised is not the one that stands there"
        )
    stored, faults = read_stored(folder / "rollouts")
    open_groups, more_faults = read_open(folder / "open.db")
    rows = [one.row for one in stored if one.row is not None]
    bound = config.schedule.bound
    limits = Limits(
        group_size=config.schedule.group_size,
        max_tokens=config.rollout.max_completion_tokens,
        max_attempts=config.schedule.max_attempts,
    )
    report.problems += [
        *faults,
        *more_faults,
        *history.problems,
        *check_beside(history, folder),
        *check_rows(history, stored, limits),
        *check_ledger(history, stored, open_groups, limits),
        *check_bound(rows, bound),
    ]
    report.c1 = {
        "trajectories": len(stored) + sum(map(len, open_groups.values())),
        "tokens": sum(answer.tokens for answer in history.answers.values() if answer.group is not None),
        "violations": sum(problem.startswith("C1") for problem in report.problems),
    }
    report.c2 = ledger(history)
    _set_aside(report, config)
    report.c3 = {
        "bound": bound,
        "max": max(map(staleness_of, (row for row in rows if row.status == "trained")), default=None),
    }
    if recompute > 0:
        # Only here, because it needs torch: the plain audit runs anywhere, in a second.
        from dora_rl.audit.recompute import recompute_logprobs

        trajectories = [row.trajectory for row in rows] + [one for group in open_groups.values() for one in group]
        again = recompute_logprobs(folder, config, trajectories, recompute, made=len(history.published))
        report.recomputed = again.recomputed
        report.problems += again.problems
        report.notes += again.notes
    return report


def _set_aside(report: Report, config: Config) -> None:
    """What a strategy does not promise is counted, not judged."""
    for promise in sorted({"C1", "C2", "C3"} - set(config.schedule.promises)):
        broken = [problem for problem in report.problems if problem.startswith(promise)]
        report.problems = [problem for problem in report.problems if not problem.startswith(promise)]
        report.not_promised[promise] = len(broken)
        if broken:
            report.notes.append(f"the first of these: {broken[0]}")


def ledger(history: History) -> dict[str, int]:
    """Where each dispatched group ended, from the journal alone."""
    ended = ("trained", "filtered", "failed", "dropped")
    counts = Counter(
        "interrupted" if history.interrupted and group.status not in ended else group.status
        for group in history.groups.values()
    )
    names = ("running", "ready", "seated", *ended, "interrupted", "rolled_back")
    return {"dispatched": len(history.groups)} | {name: counts[name] for name in names}
