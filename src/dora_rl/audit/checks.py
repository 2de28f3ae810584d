"""C1, C2 and C3 as sentences about the stored trajectories, held against the journal's own account of them."""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from pathlib import Path
from typing import Any

from dora_rl.audit.history import Answer, Group, History
from dora_rl.audit.lines import read_metrics_line
from dora_rl.wire.iteration_files import RolloutRow, read_records, row_of
from dora_rl.wire.open_store import OpenStore
from dora_rl.wire.rollouts import RolloutFileError, Trajectory, digest

EPSILON = 1e-6
"""Of rewards: what the advantage's denominator has added, and the relative spread below which rewards are equal."""


@dataclass(slots=True, kw_only=True)
class Stored:
    """A row of an iteration's file. `row` is None when it is no trajectory, and then `fault` says why."""

    iteration: int
    group: int
    record: dict[str, Any]
    row: RolloutRow | None
    fault: str | None

    @property
    def name(self) -> str:
        label = f"member {self.record['member']} of group {self.group}, rollouts/{self.iteration}.parquet"
        return label if self.row is None else f"trajectory {self.row.trajectory.rollout} ({label})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the configuration promised of every group and answer."""

    group_size: int
    max_tokens: int
    """Budget of an answer."""
    max_attempts: int
    """Failures after which an answer is given up."""


def read_stored(folder: Path) -> tuple[list[Stored], list[str]]:
    """Every row of every iteration's file, and the problems of files that cannot be read."""
    stored: list[Stored] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.parquet")):
        if not path.stem.isdecimal():
            problems.append(f"C2: {path} is named after no iteration; remove what does not belong there")
            continue
        try:
            records = read_records(path)
        except RolloutFileError as error:
            problems.append(f"C2: {error}")
            continue
        stored += [_stored(int(path.stem), record) for record in records]
    return stored, problems


def read_open(path: Path) -> tuple[dict[int, tuple[Trajectory, ...]], list[str]]:
    """The groups in `open.db`, and problems. A run in which no group was ever complete has no such file."""
    if not path.exists():
        return {}, []
    groups: dict[int, tuple[Trajectory, ...]] = {}
    problems: list[str] = []
    try:
        with OpenStore(path, read_only=True) as store:
            for group in store.group_ids():
                try:
                    groups[group] = store.get_group(group)
                except RolloutFileError as error:
                    problems.append(f"C2: {error}")
                except (sqlite3.Error, RecursionError) as error:
                    problems.append(f"C2: group {group} in {path} is damaged: {error}")
    except RolloutFileError as error:
        problems.append(f"C2: {error}")
    except sqlite3.Error as error:
        problems.append(f"C2: {path} is damaged: {error}")
    return groups, problems


def check_rows(history: History, stored: Iterable[Stored], limits: Limits) -> Iterator[str]:
    """Each stored trajectory by itself: version, segments, length and iteration are those of the journal."""
    for one in stored:
        if one.row is None:
            yield f"C1: {one.name}: {one.fault}"
        group = history.groups.get(one.group)
        if group is None:
            yield f"C2: {one.name}: the journal never dispatched its group"
            continue
        yield from _check_place(one, group)
        if one.row is not None:
            answer = history.answers.get(group.members.get(one.record["member"], -1))
            yield from check_trajectory(one.name, one.row.trajectory, group, answer)
            yield from check_end(one.name, answer, limits)


def check_trajectory(name: str, trajectory: Trajectory, group: Group, answer: Answer | None) -> Iterator[str]:
    """C1 token by token (a trajectory's segments cover its tokens), and C2: neither shortened nor relabelled."""
    if answer is None or answer.rollout != trajectory.rollout:
        yield f"C2: {name}: the journal has {answer.name if answer else 'no such member'} in its place"
        return
    if trajectory.version != group.version:
        yield f"C1: {name}: stamped version {trajectory.version}, dispatched under version {group.version}"
    segments = [(s.version, str(s.instance), s.end - s.start) for s in trajectory.segments if s.end > s.start]
    length = len(trajectory.completion_token_ids)
    if length != answer.tokens:
        yield f"C2: {name}: {length} completion tokens, the journal counted {answer.tokens}"
    elif segments != answer.segments:
        yield f"C1: {name}: segments (version, instance, tokens) {segments}, the journal has {answer.segments}"
    # An answer told to end early whose budget is spent has reached its length; `check_end` asks whether it is.
    alike = ("length", "detached") if answer.reason == "detached" else (answer.reason,)
    if trajectory.finish_reason not in alike:
        yield f"C2: {name}: finish reason {trajectory.finish_reason!r}, the journal has {answer.reason!r}"
    if trajectory.member < len(group.rewards) and trajectory.reward != group.rewards[trajectory.member]:
        yield f"C2: {name}: reward {trajectory.reward}, the journal has {group.rewards[trajectory.member]}"


def check_end(name: str, answer: Answer | None, limits: Limits) -> Iterator[str]:
    """C2: an answer ended of itself, or because its budget was spent, or after as many failures as are allowed."""
    if answer is None:
        return  # `check_trajectory` has said so
    short = answer.tokens != limits.max_tokens
    if answer.tokens > limits.max_tokens:
        yield f"C2: {name}: {answer.tokens} completion tokens, rollout.max_completion_tokens is {limits.max_tokens}"
    elif answer.reason in ("length", "detached") and short:
        yield (
            f"C2: {name}: cut short: it ended as {answer.reason!r} with {answer.tokens} tokens, expected "
            f"{limits.max_tokens} (rollout.max_completion_tokens)"
        )
    elif answer.reason == "failed" and short and answer.failures < limits.max_attempts:
        yield (
            f"C2: {name}: given up with {answer.tokens} tokens after {answer.failures} failures, expected "
            f"{limits.max_attempts} (schedule.max_attempts)"
        )


def check_beside(history: History, folder: Path) -> Iterator[str]:
    """C2: what lies beside the journal shows no more of the run than the journal tells."""
    iterations = {int(path.stem) for path in (folder / "rollouts").glob("*.parquet") if path.stem.isdecimal()}
    if surplus := sorted(iterations - history.closed):
        yield f"C2: rollouts/ has iterations {surplus}, which the journal never closed; restore the whole journal"
    versions = {int(path.name) for path in (folder / "weights").glob("*") if path.name.isdecimal()}
    if surplus := sorted(versions - history.publishing):
        yield f"C2: weights/ has versions {surplus}, which the journal never published; restore the whole journal"
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_bytes().splitlines() if metrics.is_file() else []
    told = {line.iteration for row in rows if (line := read_metrics_line(row)) is not None}
    if surplus := sorted(told - history.closed):
        yield f"C2: metrics.jsonl has iterations {surplus}, which the journal never closed; restore the whole journal"


def check_group(
    group: Group, where: str, members: Sequence[Trajectory], *, group_size: int, durable: bool = True
) -> Iterator[str]:
    """A group is whole, and as it was when its rewards became known; `durable`: the journal must know it is."""
    present = Counter(member.member for member in members)
    for member in range(group_size):
        if present[member] != 1:
            label = f"trajectory {group.members.get(member)} (member {member} of group {group.id})"
            yield f"C2: {label} is {present[member]} times in {where}, expected once"
    if strangers := sorted(set(present) - set(range(group_size))):
        yield f"C2: group {group.id} in {where} has members {strangers}, expected 0 to {group_size - 1}"
    if any(n != 1 for n in present.values()) or len(present) != group_size:
        return
    if group.digest is None:
        if durable:
            yield f"C2: group {group.id} is in {where}, but the journal does not say that it was scored"
    elif len(group.rewards) != group_size:
        yield f"C2: group {group.id}: the journal has {len(group.rewards)} rewards for {group_size} members"
    else:
        yield from _check_digests(group, where, members)


def check_ledger(
    history: History,
    stored: Sequence[Stored],
    open_groups: dict[int, tuple[Trajectory, ...]],
    limits: Limits,
) -> Iterator[str]:
    """Dispatched groups are exactly those in files, in open.db, or unfinished when the run was ended; each once."""
    by_group: dict[int, list[Stored]] = {}
    for one in stored:
        by_group.setdefault(one.group, []).append(one)
    for group in history.groups.values():
        rows = by_group.get(group.id, [])
        if group.closing is not None and group.closing.status == "dropped":
            yield f"C2: group {group.id} was thrown away in iteration {group.closing.iteration}"
        elif group.closing is not None and (rows or group.closing.iteration in history.written):
            yield from _check_closed(group, rows, group_size=limits.group_size)
        elif group.digest is not None and group.id not in open_groups:
            yield f"C2: group {group.id} was scored and is in no file: not in open.db, not in rollouts/"
        elif history.finished and group.status in ("running", "ready", "seated"):
            yield f"C2: group {group.id} was dispatched and is still {group.status}, although the run came to its end"
    for name, members in open_groups.items():
        if name not in history.groups:
            yield f"C2: group {name} is in open.db, but the journal never dispatched it"
            continue
        group = history.groups[name]
        if group.lost:
            continue  # its record is of no use any more, and is replaced when the group has been sampled again
        for member in members:
            label = f"trajectory {member.rollout} (member {member.member} of group {name}, open.db)"
            answer = history.answers.get(group.members.get(member.member, -1))
            yield from check_trajectory(label, member, group, answer)
            yield from check_end(label, answer, limits)
        # A run that is killed between the commit and the journal's next line leaves a group that is a step ahead.
        yield from check_group(group, "open.db", members, group_size=limits.group_size, durable=history.finished)
    if history.finished:
        gaps = sorted(set(range(len(history.groups))) - set(history.groups))
        if gaps:
            yield f"C2: groups are counted from 0 without a gap, but {gaps} were never dispatched"


def check_bound(rows: Iterable[RolloutRow], bound: int) -> Iterator[str]:
    """C3, from the rows' own columns; `check_rows` has held these against the journal."""
    for row in rows:
        if row.status == "trained" and not 0 <= staleness_of(row) <= bound:
            yield (
                f"C3: trajectory {row.trajectory.rollout} (group {row.trajectory.group_id}) was sampled by version "
                f"{row.trajectory.version} and trained at {row.trained_at_version}: {staleness_of(row)} versions old, "
                f"the bound is {bound}"
            )


def staleness_of(row: RolloutRow) -> int:
    return row.trained_at_version - row.trajectory.version


def _stored(iteration: int, record: dict[str, Any]) -> Stored:
    row, fault = None, None
    try:
        row = row_of(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fault = f"it is no trajectory: {error}"
    return Stored(iteration=iteration, group=record["group_id"], record=record, row=row, fault=fault)


def _check_place(one: Stored, group: Group) -> Iterator[str]:
    """The row lies where the journal closed its group, and says so."""
    closing, record = group.closing, one.record
    if closing is None:
        yield f"C2: {one.name}: the journal never closed its group"
        return
    if one.iteration != closing.iteration or record["iteration"] != closing.iteration:
        yield (
            f"C3: {one.name}: {record['status']} in iteration {record['iteration']}, the journal closed group "
            f"{group.id} in iteration {closing.iteration}"
        )
    if record["trained_at_version"] != closing.trained_at:
        yield (
            f"C3: {one.name}: trained at version {record['trained_at_version']}, the journal has {closing.trained_at}"
        )
    if record["status"] != closing.status:
        yield f"C2: {one.name}: status {record['status']!r}, the journal has {closing.status!r}"


def _check_closed(group: Group, rows: list[Stored], *, group_size: int) -> Iterator[str]:
    assert group.closing is not None
    where = f"rollouts/{group.closing.iteration}.parquet"
    members = [one.row.trajectory for one in rows if one.row is not None]
    if not rows:
        yield f"C2: group {group.id} was closed as {group.closing.status} and is not in {where}"
    elif len(members) == len(rows):  # else some row is no trajectory, and has been named already
        yield from check_group(group, where, members, group_size=group_size)
        yield from _check_advantages(group, [one.row for one in rows if one.row is not None])


def _check_digests(group: Group, where: str, members: Sequence[Trajectory]) -> Iterator[str]:
    found, scored = digest(members).split("-"), (group.digest or "").split("-")
    if len(found) != len(scored):
        yield f"C2: group {group.id}: the journal has digests of {len(scored)} members, {where} has {len(found)}"
        return
    ordered = sorted(members, key=lambda member: member.member)
    for member, now, then in zip(ordered, found, scored, strict=True):
        if now != then:
            yield (
                f"C2: trajectory {member.rollout} (member {member.member} of group {group.id}) in {where} is not what "
                f"was scored: its tokens, log-probabilities, rewards, times or names were changed"
            )


def _check_advantages(group: Group, rows: Sequence[RolloutRow]) -> Iterator[str]:
    """What was not trained has no advantage; the others have those that follow from the group's rewards."""
    assert group.closing is not None
    trained = group.closing.status == "trained"
    expected = advantages([row.trajectory.reward for row in rows]) if trained else [None] * len(rows)
    wrong = [
        f"trajectory {row.trajectory.rollout}: {row.advantage}, expected {value}"
        for row, value in zip(rows, expected, strict=True)
        if not _alike(row.advantage, value)
    ]
    if wrong:
        yield f"C2: group {group.id}: advantages do not follow from its rewards: {'; '.join(wrong)}"


def _alike(came: float | None, expected: float | None) -> bool:
    if came is None or expected is None:
        return came is expected
    return isclose(came, expected, rel_tol=1e-6, abs_tol=1e-9)


def advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """(reward - mean) / (standard deviation + 1e-6), told again: nobody's without reward, 0 where all are equal."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return [None] * len(rewards)
    mean = sum(known) / len(known)
    largest = max(1.0, max(map(abs, known)))
    if max(known) - min(known) <= EPSILON * largest:
        return [None if reward is None else 0.0 for reward in rewards]
    deviation = sqrt(sum((reward - mean) * (reward - mean) for reward in known) / len(known))
    return [None if reward is None else (reward - mean) / (deviation + EPSILON) for reward in rewards]
