"""What the judge found: the figures of each promise, and every problem in one line that names what is wrong."""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputed:
    """One trajectory scored again, in nats per token."""

    trajectory: int
    version: int
    own_max_diff: float
    others: dict[int, float]
    """Mean absolute difference under every other kept version with different weights."""


@dataclass(kw_only=True, slots=True)
class Report:
    c1: dict[str, int] = field(default_factory=dict)
    c2: dict[str, int] = field(default_factory=dict)
    c3: dict[str, int | None] = field(default_factory=dict)
    recomputed: list[Recomputed] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Worth saying, but no broken promise."""
    not_promised: dict[str, int] = field(default_factory=dict)
    """Violations of what the run's strategy does not promise, by promise: counted, not judged."""

    @property
    def verdict(self) -> str:
        return "fail" if self.problems else "pass"

    def to_json(self) -> dict[str, Any]:
        """`audit --json`."""
        return {
            "verdict": self.verdict,
            "c1": self.c1,
            "c2": self.c2,
            "c3": self.c3,
            "recomputed": [
                {
                    "trajectory": one.trajectory,
                    "version": one.version,
                    "own_max_diff": one.own_max_diff,
                    "others": {str(version): diff for version, diff in one.others.items()},
                }
                for one in self.recomputed
            ],
            "problems": self.problems,
            "not_promised": self.not_promised,
            "notes": self.notes,
        }

    def to_text(self) -> str:
        """The same for people: verdict, one line per promise, one per problem."""
        ledger = ", ".join(f"{n} {name}" for name, n in self.c2.items() if n and name != "dispatched")
        verdict = self.verdict
        if self.not_promised:
            verdict += f" (without {', '.join(self.not_promised)}, which this strategy does not promise)"
        if not self.c2.get("trained"):
            verdict += " (but nothing was trained)"
        promises = {
            "C1": f"one version per trajectory   {self.c1['trajectories']} trajectories, {self.c1['tokens']} tokens",
            "C2": f"nothing thrown away          {self.c2['dispatched']} groups dispatched: {ledger or 'none'}",
            "C3": f"bounded staleness            {_staleness(self.c3)}",
        }
        lines = [f"verdict: {verdict}"]
        for name, text in promises.items():
            broken = f"; NOT PROMISED, broken {self.not_promised[name]} times" if name in self.not_promised else ""
            lines.append(f"  {name} {text}{broken}")
        if self.recomputed:
            own = max(one.own_max_diff for one in self.recomputed)
            others = [diff for one in self.recomputed for diff in one.others.values()]
            text = f"{len(self.recomputed)} trajectories, largest difference {own:.1e} under their own version"
            if others:
                text += f", mean {sum(others) / len(others):.1e} under others"
            lines.append(f"  recomputed log-probabilities    {text}")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join(lines)

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2)


def _staleness(c3: dict[str, int | None]) -> str:
    largest = "nothing was trained" if c3["max"] is None else f"largest {c3['max']}"
    return f"{largest}, bound {c3['bound']} versions"
