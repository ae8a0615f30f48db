"""A plain DDP loop under torchrun, as torch's documentation has it: what a frozen or lost rank costs by default.

    torchrun --nproc-per-node 4 --max-restarts 3 -m benchmarks.torch_ranks FOLDER TIMEOUT_SECONDS

Each rank writes a line with the time of each step to FOLDER/<pid>. It resumes nothing: what is timed is the start.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEP_SECONDS = 0.1


def main() -> None:
    """Train until somebody ends this process."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    model = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (folder / str(os.getpid())).open("a", buffering=1) as steps:
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, 256)).sum().backward()
            optimizer.step()
            steps.write(f"{time.time():.4f}\n")
            time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()
