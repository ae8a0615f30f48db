from __future__ import annotations

from training.parallel.report import report
from training.parallel.wire import Whereabouts, decode_word, encode_word

WAITING = Whereabouts(
    begun=41, recent=("gloo:all_reduce Float [64, 10], scheduled",), waits=True, stack=("a.py:1 wait",)
)
WORKING = Whereabouts(begun=40, stack=("job.py:7 forward", "loop.py:9 train"))


def test_ranks_at_the_same_place_stand_together() -> None:
    assert report([(3, WAITING), (1, WORKING), (0, WAITING), (2, None)]) == (
        "ranks 0, 3: 41 collectives begun, the newest first:\n"
        "  gloo:all_reduce Float [64, 10], scheduled\n"
        " waiting in\n"
        "  a.py:1 wait\n"
        "rank 1: 40 collectives begun\n"
        " in\n"
        "  job.py:7 forward\n"
        "  loop.py:9 train\n"
        "rank 2: no answer"
    )


def test_a_rank_without_a_stack_and_without_collectives() -> None:
    assert report([(0, Whereabouts(begun=0))]) == "rank 0: 0 collectives begun"


def test_it_crosses_the_wire() -> None:
    assert decode_word(encode_word(WAITING)) == WAITING
