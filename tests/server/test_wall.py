"""No input kills, hangs or confuses the server, and nobody beside it notices."""

from __future__ import annotations

import httpx

from .scripted import running_server, wait_for
from .wall import attacks, run_wall


def test_wall() -> None:
    assert sum(1 for _ in attacks()) >= 3000
    with running_server(step_seconds=0.0005, request_timeout=5.0) as server:
        report = run_wall(server.url)
        assert report.wrong == []
        assert report.disturbed == []
        assert report.victims >= 10
        assert report.sent >= 3000
        assert set(report.statuses) <= {0, 100, 200, 400, 404, 405, 408, 413, 415, 431}
        wait_for(lambda: server.service.in_flight == 0 and not server.client.running)
        assert server.service.sequences == 0
        assert httpx.get(f"{server.url}/readyz").status_code == 200
