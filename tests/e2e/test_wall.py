"""The wall of bad inputs against the real server."""

from __future__ import annotations

import pytest

from tests.server.wall import attacks, run_wall

from .serving import Server


@pytest.mark.slow
def test_wall(served: Server) -> None:
    assert sum(1 for _ in attacks()) >= 3000
    pids = served.children
    report = run_wall(served.url)
    assert report.wrong == []
    assert report.disturbed == []
    assert report.victims >= 10
    assert report.sent >= 3000
    assert set(report.statuses) <= {0, 100, 200, 400, 404, 405, 408, 413, 415, 431}
    stats = served.quiet()
    assert stats["bad_messages"] == 0
    assert served.children == pids
    assert served.get("/readyz").status_code == 200
