"""Whether a paced run was what it claims to be: how many of its pieces of work took longer than the law says."""

import json
from collections.abc import Collection
from pathlib import Path

from dora_rl.pace.clock import MAX_OVERRUNS
from dora_rl.run.recorder import Print
from dora_rl.runtime.ports import Engine, Trainer


async def report_pace(folder: Path, engines: Collection[Engine], trainer: Trainer, out: Print) -> None:
    """Write `pace.json` and say so when the run is invalid."""
    reports = [*[await engine.pace_report() for engine in engines], await trainer.pace_report()]
    pieces, overruns = (sum(column) for column in zip(*reports, strict=True))
    share = overruns / max(1, pieces)
    facts = {"pieces": pieces, "overruns": overruns, "share": share, "valid": share <= MAX_OVERRUNS}
    (folder / "pace.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    verdict = "" if facts["valid"] else f"; more than {MAX_OVERRUNS:.0%}, so its times are this machine's and INVALID"
    out(f"  {'pace':<17} {overruns} of {pieces} paced pieces of work overran ({share:.2%}){verdict}")
