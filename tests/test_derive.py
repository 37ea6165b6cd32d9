"""The shipped workloads are what their cards say they are made of."""

from pathlib import Path

import pytest

from workloads import derive

pytestmark = pytest.mark.once


def test_the_shipped_workloads_are_made_from_the_windows_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made again they are the same, byte for byte: rows, card, profile and licence."""
    shipped = derive.HERE
    monkeypatch.setattr(derive, "HERE", tmp_path)

    folders = derive.write_all()

    for made in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert made.read_bytes() == (shipped / made.relative_to(tmp_path)).read_bytes(), made.name
    assert len(folders) == 3
