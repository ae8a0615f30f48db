"""Training on real S3 servers: killed at any request and resumed; and the server itself killed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.bits import bits
from tests.support.cuts import Training, mnist_config, start_training, train_until, write_digits
from tests.support.faults import RuledStore
from tests.support.s3_proxy import Asked, Proxy, Verdict
from tests.support.s3_servers import BUCKET, RawBucket, S3Server, seaweed_server, set_aws
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Committed
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import open_store
from training.checkpoint.store.retry import RetryingStore
from training.checkpoint.store.s3 import S3Store

pytest_plugins = ["tests.support.s3_fixtures"]
pytestmark = pytest.mark.xdist_group("s3")
CONFIG = mnist_config(epochs=2)


class Killer:
    """Kills a training at its n-th request to the store. The request takes effect, or it does not."""

    def __init__(self) -> None:
        self.count, self.at, self.applied = 0, 0, False
        self.victim: Training | None = None
        self.kills = 0
        self._lock = threading.Lock()

    def aim(self, at: int, applied: bool) -> None:
        self.count, self.at, self.applied, self.victim = 0, at, applied, None

    def __call__(self, asked: Asked) -> Verdict:
        with self._lock:
            self.count += 1
            if self.count < self.at or not self.at:
                return None
            while self.victim is None:  # it is only just being started
                time.sleep(0.01)
            self.kills += self.count == self.at
            self.victim.kill()
            wait_until_gone(self.victim.process.pid)
            return "lose" if self.applied and self.count == self.at else "drop"


def wait_until_gone(pid: int) -> None:
    """Not by `join`, which is for one thread only, and the test is waiting in it."""
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} has survived"
        time.sleep(0.005)


def straight(tmp_path: Path, digits: Path) -> str:
    digest = train_until(CONFIG, tmp_path / "straight", digits)
    assert digest is not None
    return digest


def killed_and_resumed(bucket: RawBucket, proxy: Proxy, digits: Path, seed: int, kills: int) -> str | None:
    """Final digest of a run that was killed so many times at most, at requests that the seed chooses."""
    rng = random.Random(seed)
    proxy.rule = killer = Killer()
    for _ in range(kills):
        killer.aim(rng.randint(2, 30), rng.random() < 0.5)
        killer.victim = training = start_training(CONFIG, bucket.url, digits)
        answer = training.answer()
        if answer is not None:  # done, before the request that it was to be killed at
            break
    assert killer.kills
    killer.aim(0, False)
    return train_until(CONFIG, bucket.url, digits)


def test_a_training_that_is_killed_at_random_requests_ends_as_if_it_had_never_been(
    bucket: RawBucket, proxy: Proxy, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    digits = write_digits(tmp_path / "digits")
    expected = straight(tmp_path, digits)
    assert killed_and_resumed(bucket, proxy, digits, seed, kills=3) == expected, f"seed {seed}"
    lineage = read_lineage(open_store(bucket.url))
    assert lineage.head is not None
    assert lineage.head.manifest.state_digest == expected


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(25))
def test_a_training_that_is_killed_at_many_requests(
    bucket: RawBucket, proxy: Proxy, tmp_path: Path, seed: int
) -> None:
    digits = write_digits(tmp_path / "digits")
    assert killed_and_resumed(bucket, proxy, digits, seed, kills=6) == straight(tmp_path, digits), f"seed {seed}"


@pytest.fixture
def mortal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A SeaweedFS of one's own, that may be killed."""
    server = seaweed_server(tmp_path)
    try:
        server.start()
        server.client.create_bucket(Bucket=BUCKET)
        set_aws(monkeypatch, server.url)
        yield server
    finally:
        server.kill()


def state_at(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randint(0, 256, (3_000_000,), dtype=torch.uint8, generator=generator)}


class Outage:
    """Kills the server at one operation of one save, and starts it again in the background."""

    def __init__(self, server: S3Server, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.at: tuple[str, str] | None = None
        self.count = 0
        self._restart = threading.Thread()

    def __call__(self, operation: str, key: str) -> None:
        if self.at is None or operation != self.at[0] or not key.startswith(self.at[1]):
            return
        self.at, self.count = None, self.count + 1
        self._restart = threading.Thread(target=self._happen, args=(self.rng.uniform(0, 0.03),))
        self._restart.start()

    def _happen(self, delay_seconds: float) -> None:
        time.sleep(delay_seconds)  # the operation has begun, or has just ended
        self.server.kill()
        self.server.start()

    def join(self) -> None:
        if self._restart.ident is not None:
            self._restart.join()


def test_a_server_that_is_killed_during_saves_loses_nothing_that_was_acknowledged(mortal: S3Server) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    outage = Outage(mortal, random.Random(seed))
    outages = {2: ("put", "packs/"), 4: ("put_if_absent", "manifests/")}
    url = f"s3://{BUCKET}/mortal"
    acknowledged: list[Committed] = []
    store = RetryingStore(RuledStore(S3Store(url), outage), budget_seconds=90, attempts=1000)
    with IncrementalCheckpointer(store, on_saved=acknowledged.append) as checkpointer:
        for step in range(6):
            outage.at = outages.get(step)
            checkpointer.save(state_at(step), base=step == 3)
            checkpointer.wait()
            outage.join()
    mortal.kill()
    mortal.start()
    assert outage.count == 2
    assert [committed.ref.sequence for committed in acknowledged] == list(range(6)), f"seed {seed}"
    later = open_store(url)
    for step, committed in enumerate(acknowledged):
        restored = restore_checkpoint(later, committed.ref.token, committed.ref.sequence, "default")
        assert restored.checkpoint.ref == committed.ref, f"seed {seed}"
        assert bits(dict(restored)) == bits(state_at(step)), f"seed {seed}"
