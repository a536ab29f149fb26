"""The fixed prompts that run on emulated graphs in CI, on real ones, with pages that go to pinned memory and back."""

from __future__ import annotations

import pytest

from tests.sparse_pcg.test_end_to_end import (  # noqa: F401
    served,
    test_logprobs_and_greedy_ids_are_those_with_breaks,
    with_breaks,
)

pytestmark = pytest.mark.gpu
