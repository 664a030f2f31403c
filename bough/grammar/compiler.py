"""Compiles constraints once each: in the background, cached by content, with failures remembered."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from bough.base.constraint import Constraint
from bough.base.errors import BoughError, InvalidRequest
from bough.base.limits import Limits
from bough.base.turns import Turns
from bough.grammar.admission import check_size, check_steps
from bough.grammar.base import Backend, Template
from bough.grammar.tags import Tags
from bough.grammar.threads import in_pauses

REMEMBERED_FAILURES = 1024
"""Constraints whose refusal is remembered. Compiling is deterministic, so a refusal holds for ever."""


class Result(Protocol):
    """A compile that runs elsewhere; :class:`concurrent.futures.Future` is one."""

    def done(self) -> bool: ...
    def result(self) -> Template: ...


Submit = Callable[[Callable[[], Template]], Result]

LARGE_CHARS = 16384
"""A constraint of more may take seconds to compile, so one thread is always kept for the others."""


class Ticket:
    """Stands for the template of one constraint; shared by all who asked for it meanwhile.

    Attributes:
        key: of the constraint.
        waiting: how many of them are still there.
    """

    def __init__(self, key: bytes, template: Template | None = None) -> None:
        self.key = key
        self.waiting = 1
        self._template = template
        self._error: BoughError | None = None

    def poll(self) -> Template | None:
        """The template, None while it is being made; raises BoughError, mostly InvalidRequest, if that failed."""
        if self._error is not None:
            raise self._error
        return self._template

    def settle(self, outcome: Template | BoughError) -> None:
        if isinstance(outcome, BoughError):
            self._error = outcome
        else:
            self._template = outcome


Job = tuple[Ticket, Constraint]


class GrammarCompiler:
    """Belongs to the engine's thread; only the backend's ``compile`` runs elsewhere, by ``submit``.

    What waits, waits here: whoever goes takes a compile that has not begun along, tenants take turns, and none of the
    large ones is begun as long as it would leave no thread for the others.

    Args:
        backend: the grammar library.
        limits: bounds on constraints, and ``grammar_cache_bytes`` of the templates that are kept.
        submit: runs a function in the background.
        threads: so many functions it runs at once.
        tags: those of the reasoning, in the vocabulary of the backend.
    """

    def __init__(self, backend: Backend, limits: Limits, submit: Submit, threads: int, tags: Tags) -> None:
        self.backend = backend
        self.tags = tags
        self._limits = limits
        self._submit = submit
        self._threads = threads
        self._small, self._large = Turns[bytes, Job](), Turns[bytes, Job]()
        self._running: dict[bytes, tuple[Ticket, Result]] = {}
        self._running_large: set[bytes] = set()
        self._templates: OrderedDict[bytes, Template] = OrderedDict()
        self._failures: OrderedDict[bytes, str] = OrderedDict()
        self._bytes = 0
        self.compiled = 0
        """Compiles that were started."""

    def start(self, constraint: Constraint, tenant: str = "") -> Ticket:
        """Begin to compile ``constraint`` for ``tenant``, unless that is done or under way.

        Raises InvalidRequest for what is too large, and for what failed before; what is over another limit fails later.
        """
        key = key_of(constraint)
        self.collect()
        if (template := self._templates.get(key)) is not None:
            self._templates.move_to_end(key)
            return Ticket(key, template)
        if (message := self._failures.get(key)) is not None:
            raise InvalidRequest(message, param=constraint.kind)
        if (running := self._running.get(key)) is not None:
            return running[0]
        lane = self._large if len(constraint.text) > LARGE_CHARS else self._small
        if (job := lane.get(key)) is not None:
            job[0].waiting += 1
        else:
            check_size(constraint, self._limits)
            job = Ticket(key), constraint
        lane.push(tenant, key, job)
        self._begin()
        return job[0]

    def drop(self, ticket: Ticket) -> None:
        """One of those who share ``ticket`` is gone."""
        ticket.waiting -= 1
        for lane in (self._small, self._large):
            job = lane.get(ticket.key)
            if not ticket.waiting and job is not None and job[0] is ticket:  # another compile of the same may be here
                lane.drop(ticket.key)

    def _begin(self) -> None:
        """Begin as many of the waiting compiles as may run."""
        while len(self._running) < self._threads:
            job = None if len(self._running_large) >= max(1, self._threads - 1) else self._large.pop()
            if job is not None:
                self._running_large.add(job[0].key)
            elif (job := self._small.pop()) is None:
                return
            ticket, constraint = job
            self.compiled += 1
            self._running[ticket.key] = ticket, self._submit(partial(self._compile, constraint))

    def _compile(self, constraint: Constraint) -> Template:
        in_pauses(check_steps(constraint, self._limits))
        return self.backend.compile(constraint)

    def collect(self) -> None:
        """Take in the compiles that have ended; their tickets know then."""
        for key in [key for key, (_, result) in self._running.items() if result.done()]:
            ticket, result = self._running.pop(key)
            self._running_large.discard(key)
            try:
                template = result.result()
            except InvalidRequest as error:
                ticket.settle(error)
                self._failures[key] = error.message
                if len(self._failures) > REMEMBERED_FAILURES:
                    self._failures.popitem(last=False)
            except Exception as error:  # the next request with this constraint tries again
                ticket.settle(_as_bough_error(error))
            else:
                ticket.settle(template)
                self._keep(key, template)
        self._begin()

    def _keep(self, key: bytes, template: Template) -> None:
        self._templates[key] = template
        self._bytes += template.bytes
        while self._bytes > self._limits.grammar_cache_bytes and len(self._templates) > 1:
            _, oldest = self._templates.popitem(last=False)
            self._bytes -= oldest.bytes


def key_of(constraint: Constraint) -> bytes:
    """SHA-256 of everything that determines the language."""
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()


def _as_bough_error(error: Exception) -> BoughError:
    if isinstance(error, BoughError):
        return error
    return BoughError(f"the compile of the grammar failed: {type(error).__name__}")
