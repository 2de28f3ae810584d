"""`make accept STEP=n`: shows every line of what step n must show, on real runs, and writes each line's figures.

One JSON file a line under docs/results/step-n/, with commit and machine. `--only NAME` measures some lines again, from
runs of earlier lines in runs/accept-n/ where it needs them. Every limit stands beside the figure that it judges.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from acceptance import moving_answers, rough_use, whole_loop
from acceptance.means import Lines, judged, output_of
from dora_rl.bench.machine import machine

RESULTS = Path("docs/results")
STEPS: dict[int, Lines] = {1: whole_loop.LINES, 2: moving_answers.LINES, 3: rough_use.LINES}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make accept", description=__doc__)
    parser.add_argument("--step", type=int, required=True, choices=sorted(STEPS))
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these lines only")
    arguments = parser.parse_args(argv)
    lines = STEPS[arguments.step]
    names = arguments.only or list(lines)
    unknown = [name for name in names if name not in lines]
    if unknown:
        parser.error(f"step {arguments.step} has no line {unknown[0]!r}, only {', '.join(lines)}")
    failed = [name for name in names if not _show(arguments.step, name)]
    print(
        f"\n{len(names) - len(failed)} of {len(names)} lines shown" + (f"; not: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def _show(step: int, name: str) -> bool:
    measure, sentence = STEPS[step][name]
    print(f"\n== {name}: {sentence}", flush=True)
    began = time.monotonic()
    try:
        figures = measure()
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        # One line that cannot be measured must not hide the others.
        figures = {"checks": [judged("measured at all", 0, f"1: {error}", passed=False)]}
    passed = all(check["passed"] for check in figures["checks"])
    record = {
        "line": sentence,
        "passed": passed,
        "commit": output_of("git", "rev-parse", "HEAD"),
        "machine": machine(),
        "seconds": round(time.monotonic() - began, 1),
        **figures,
    }
    folder = RESULTS / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for check in figures["checks"]:
        print(
            f"  {'ok  ' if check['passed'] else 'FAIL'} {check['what']}: {check['figure']} ({check['limit']})",
            flush=True,
        )
    return passed


if __name__ == "__main__":
    sys.exit(main())
