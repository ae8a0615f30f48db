"""The whole of a training in one process, never interrupted: what a drill compares with.

`python -m training.straight` reads one JSON line (config, data_folder, store_url, run) and answers with one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from training.config import parse_config
from training.guard import die_with_parent


def main() -> None:
    """Read the question, train, answer."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in a training process
    sys.path.insert(0, str(Path.cwd()))
    die_with_parent()
    question: dict[str, Any] = json.loads(sys.stdin.readline())
    from training.session import train_range

    folder = question["data_folder"]
    config, run = parse_config(question["config"]), question["run"]
    done = train_range(config, question["store_url"], run, data_folder=Path(folder) if folder else None)
    print(json.dumps({"state_digest": done.state_digest, "step": done.position.step}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
