"""The random batches of target and draft that run on emulated graphs in CI, on real ones, streams and pinned memory."""

from __future__ import annotations

import pytest

from tests.sparse_pcg.test_draft_sequences import (  # noqa: F401
    scarce,
    test_pages_that_came_back_equal_those_that_stayed,
    test_replay_equals_uncaptured_and_breaks,
)

pytestmark = pytest.mark.gpu
