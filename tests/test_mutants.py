from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants import MUTANTS, ROOT, survivors


def test_the_faults_fit_the_code() -> None:
    """Every text to replace is there exactly once, and the test named with it exists."""
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant
        assert mutant.new != mutant.old and "\n" not in mutant.new, mutant
        file, *_, function = mutant.test.split("::")
        assert f"def {function.split('[')[0]}(" in (ROOT / file).read_text(), mutant
    assert len(MUTANTS) >= 10
    assert max(Counter((m.file, m.old, m.new) for m in MUTANTS).values()) == 1


@pytest.mark.heavy
def test_every_fault_is_caught() -> None:
    assert survivors(MUTANTS) == []
