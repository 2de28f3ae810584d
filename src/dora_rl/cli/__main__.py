"""`python -m dora_rl.cli` is `dora-rl`."""

import sys

from dora_rl.cli import run

sys.exit(run())
