"""What the engine must know of programs, kept by the simulation for itself: who belongs together, and their budgets."""

from __future__ import annotations

from dataclasses import dataclass, field

from bough.base.messages import Request
from bough.scheduler.finish import OVER_BUDGET

from .pipeline import require

Key = tuple[str, str]


@dataclass(slots=True)
class _Account:
    budget: int | None
    spent: int = 0
    ended: bool = False
    rids: dict[str, None] = field(default_factory=dict)


def key_of(request: Request) -> Key | None:
    return None if request.program is None else (request.namespace.tenant, request.program.id)


class Accounts:
    """The programs of one simulation. A budget is the same for all requests of a program."""

    def __init__(self) -> None:
        self._accounts: dict[Key, _Account] = {}

    def refuses(self, request: Request) -> bool:
        """The program of ``request`` has nothing left to generate."""
        account = self._accounts.get(key_of(request) or ("", ""))
        return account is not None and account.budget is not None and account.spent >= account.budget

    def arrived(self, request: Request) -> None:
        key, named = key_of(request), request.program
        if key is not None and named is not None:
            account = self._accounts.setdefault(key, _Account(named.budget))
            account.ended |= named.end
            account.rids[request.rid] = None

    def took(self, request: Request, n: int) -> None:
        """``n`` tokens were sent."""
        key = key_of(request)
        if key is not None:
            account = self._accounts[key]
            account.spent += n
            within = account.budget is None or account.spent <= account.budget
            require(within, "I16 budget", "{} generated {} of {}", key, account.spent, account.budget)

    def finished(self, request: Request, message: str) -> bool:
        """``request`` ended; whether the budget is why."""
        key = key_of(request)
        if key is None:
            return False
        account = self._accounts[key]
        del account.rids[request.rid]
        if account.ended and not account.rids:
            del self._accounts[key]
        cut = message == OVER_BUDGET.message
        require(not cut or account.spent == account.budget, "I16 budget", "{} was cut at {}", key, account.spent)
        return cut

    def closed(self, key: Key) -> list[str]:
        """The program ``key`` gets no more requests; the ids of those it has."""
        account = self._accounts.get(key)
        if account is None:
            return []
        account.ended = True
        if not account.rids:
            del self._accounts[key]
        return list(account.rids)
