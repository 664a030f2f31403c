"""Bugs that are put in on purpose: the tests are tested (:mod:`tests.sim.planted.mechanism`)."""

from __future__ import annotations

from .cache import CACHE, POOL, SHARING, WINDOWS
from .failures import ADAPTERS as ADAPTERS
from .failures import FAULTS, LATE
from .grammar import GRAMMAR
from .mechanism import Bug as Bug
from .mechanism import planted as planted
from .programs import AHEAD, PROGRAMS
from .scheduling import LIFE, ORDER

BUGS: tuple[Bug, ...] = CACHE + POOL + LIFE + ORDER + FAULTS + GRAMMAR + SHARING + LATE + PROGRAMS + AHEAD + WINDOWS
BY_NAME = {bug.name: bug for bug in BUGS}
