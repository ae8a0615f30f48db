"""What a rank computes does not depend on which of its threads computes it, or on what the user has exported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuts import gpt_config, write_corpus
from tests.support.gang import outcomes
from tests.support.launched import ROOT
from tests.unit.parallel.test_strategies import STRATEGIES, train

pytestmark = pytest.mark.xdist_group("ranks")
ASK = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import torch
from training.parallel.agent import launching
if __name__ == "__main__":
    with launching(), ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        print(pool.submit(torch.get_num_threads).result())
"""


def test_the_threads_of_a_rank_have_one_whatever_the_environment_says(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(ASK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "ask.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]


def test_powersgd_is_refused_where_its_sums_would_depend_on_the_thread(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    config = gpt_config(parallel=STRATEGIES["ddp-powersgd"], threads=2)
    for ok, text in outcomes(2, train, config, str(tmp_path / "store"), str(corpus), 1):
        assert not ok
        assert "powersgd needs threads: 1" in text
