"""Answers of several nodes in one stream."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.deploy import topo

NOISE = ("", "Loading module cuda/12", "{}", "hpcgpu: a word")


@given(st.lists(st.text(max_size=5000), max_size=4), st.randoms(use_true_random=False))
def test_answers_are_heard_whatever_the_order_of_their_lines(said: list[str], order: random.Random) -> None:
    stream = [line for text in said for line in topo.answer_lines(text)]
    assert {len(line.encode()) for line in stream} <= {topo.LINE_BYTES}
    stream += [f"{line}\n" for line in NOISE]
    order.shuffle(stream)
    assert sorted(topo.read_answers(stream)) == sorted(said)


def test_answers_that_did_not_come_whole_are_an_error() -> None:
    text = "".join(map(str, range(3000)))
    whole = topo.answer_lines(text)
    with pytest.raises(ValueError, match=f"of {len(whole)} lines of an answer {len(whole) - 1} have come"):
        topo.read_answers(whole[1:])
    with pytest.raises(ValueError, match="an answer has changed on its way"):
        topo.read_answers([whole[0].replace(whole[0].split()[4], "AAAA"), *whole[1:]])
