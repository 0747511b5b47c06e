"""Ctrl-C while replicas average their gradients: nothing is written, and no rank waits."""

from __future__ import annotations

import time

import pytest

from runtime import AverageBackend
from runtime.core.errors import CollectiveAborted
from tests.support.wrapping import fill, grads, nets, same, wrap

WAKE_S = 5.0


@pytest.mark.parametrize("at", [0, 1])
def test_ctrl_c_before_all_ranks_were_called_leaves_the_gradients_and_no_rank_waits(at):
    models = nets()
    fill(models)
    before = [grads(model) for model in models]
    with wrap(models, backend=AverageBackend.GLOO) as ddp:
        inboxes = ddp._reduction._threads._inboxes
        inbox = inboxes[at]

        class Interrupted:
            def put(self, call):
                inboxes[at] = inbox
                raise KeyboardInterrupt

        inboxes[at] = Interrupted()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ddp.all_reduce_gradients()
        assert time.monotonic() - begin < WAKE_S
        assert all(same(grads(m), b) for m, b in zip(models, before, strict=True))
        with pytest.raises(CollectiveAborted):
            ddp.all_reduce_gradients()
        assert time.monotonic() - begin < WAKE_S
