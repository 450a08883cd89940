"""The table of planted bugs matches the sources: `make mutants` takes minutes to find out."""

from __future__ import annotations

import pytest

from mutants.mutant import Mutant
from mutants.table import MUTANTS
from places import CSRC

pytestmark = pytest.mark.once


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_it_changes_is_there_once(mutant: Mutant) -> None:
    text = (CSRC / mutant.file).read_text()
    for before, after in mutant.changes:
        assert text.count(before) == 1, before
        assert after != before
