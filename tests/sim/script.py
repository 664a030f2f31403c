"""One seed, one script: the settings of a run and everything that happens to it, as plain data.

Swarm testing (Groce et al. 2012): each seed draws its own settings and weights and leaves whole features out,
so that combinations meet which no single mix of features would produce. Events do not refer to each other
except by request id, so any subset of them is a script too; that is what makes shrinking simple.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np

from bough.base.constraint import Reasoning
from bough.base.messages import Request
from bough.base.params import SamplingParams
from bough.base.program import Lease, Program
from bough.scheduler.planner import HEADROOM_FLOOR, HEADROOM_START
from bough.scheduler.programs import TURN_SHARE

from .adapters import NAMES
from .grammar import constraint
from .oracle import CONTEXT, NAMESPACES, VOCAB, expect, text_of


@dataclass(frozen=True, slots=True)
class Settings:
    """The world of one run.

    ``turn_share`` is that of the policy ``program``: small enough that there are several turns in a short run.
    ``headroom`` is what the planner's headroom begins with: the least is where it gets after quiet hours. ``lag`` says
    how many forwards the device may be behind the host.
    """

    page_size: int
    policy: str
    eviction: str
    cache: str
    depth: int
    step_tokens: int
    max_running: int
    n_cells: int
    max_wait: float
    queue_requests: int
    headroom: float
    jump: bool = True
    adapter_places: int = 2
    slow_adapters: bool = False
    window: int = 0
    window_cells: int = 0
    chunked: bool = False
    lag: int = 0
    turn_share: int = TURN_SHARE
    mixed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request comes in at ``step``; a client that re-uses an id waits until the earlier request has ended.

    Attributes:
        seed: the engine's draw for a request that brings no seed of its own.
        quit_after: the client aborts when it has read this many tokens; None: never.
        gates: per gate, the steps until it opens and whether it then fails; -1 steps: it refuses at once.
        poison_at: the forward that computes this position fails, every time; -1: none.
        fail_at: the row fails alone when it samples at this position; -1: none.
    """

    step: int
    request: Request
    seed: int
    quit_after: int | None = None
    gates: tuple[tuple[int, bool], ...] = ()
    poison_at: int = -1
    fail_at: int = -1


@dataclass(frozen=True, slots=True)
class Abort:
    step: int
    rids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Control:
    step: int
    op: Literal["flush_cache", "abort_all"]


@dataclass(frozen=True, slots=True)
class Jump:
    """The clock jumps."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fault:
    """The next forward fails, before or after it wrote its cells."""

    step: int
    when: Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class Operate:
    """An operator loads or unloads an adapter."""

    step: int
    op: Literal["load_adapter", "unload_adapter"]
    name: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class EndProgram:
    """A client closes its program, or aborts it as one unit."""

    step: int
    tenant: str
    program: str
    abort: bool


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A client says what its program will append: the prompt of ``what``, which is no request."""

    step: int
    what: Arrive


Event = Arrive | Abort | Control | Jump | Fault | Operate | EndProgram | Prefetch


@dataclass(frozen=True, slots=True)
class Script:
    settings: Settings
    events: list[Event] = field(default_factory=list)


FEATURES = ("shared", "duplicate", "prefix", "follow_up", "burst", "abort", "quit", "priority", "timeout", "jump",
            "flush", "gates", "poison", "transient", "row_failure", "queue_bound", "namespaces", "prompt_logprobs",
            "logprobs", "min_tokens", "stop_ids", "stop_strings", "sampling", "reuse_rid", "abort_all", "too_long",
            "pressure", "constraint", "reasoning", "program", "lease")  # fmt: skip


def write(seed: int) -> Script:
    """The script of ``seed``."""
    script = _adapted(_Writer(random.Random(seed)).write(), random.Random(f"adapters {seed}"), storm=False)
    script = _prefetched(_windowed(script, random.Random(f"window {seed}")), random.Random(f"ahead {seed}"))
    share = random.Random(f"turns {seed}").choice((TURN_SHARE, TURN_SHARE, 2, 0))
    return replace(script, settings=replace(script.settings, turn_share=share))


def _prefetched(script: Script, rng: random.Random) -> Script:
    """``script`` where some programs say what follows, and mostly go on so; drawn apart, so that the rest stays."""
    arrivals = [event for event in script.events if isinstance(event, Arrive) and event.request.program is not None]
    events: list[Event] = list(script.events)
    serial = 10_000
    for first in arrivals:
        if rng.random() < 0.4:
            continue
        space, step = first.seed % len(NAMESPACES), first.step + rng.choice((3, 6, 12, 25))
        prompt = first.request.prompt.tolist()
        answer = expect(first.request, first.seed).tokens[: rng.randint(1, 24)]
        ids = (prompt + answer + [rng.randint(1, VOCAB - 1) for _ in range(rng.randint(1, 40))])[: CONTEXT - 2]
        events.append(Prefetch(step, _followed(first, ids, step, (serial + 1) * len(NAMESPACES) + space)))
        if rng.random() < 0.8:
            said = ids[: rng.randint(len(ids) // 2, len(ids))] + [rng.randint(1, VOCAB - 1)]
            later = step + rng.choice((0, 1, 2, 5, 15))
            events.append(_followed(first, said, later, (serial + 2) * len(NAMESPACES) + space))
        serial += 2
    events.sort(key=lambda event: event.step)
    return replace(script, events=events)


def _followed(first: Arrive, ids: list[int], step: int, seed: int) -> Arrive:
    request = Request(
        rid=f"f{seed}",
        ids=np.array(ids, dtype="<i4").tobytes(),
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        namespace=first.request.namespace,
        program=msgspec.structs.replace(first.request.program, fork="", width=1) if first.request.program else None,
    )
    return Arrive(step, request, seed)


def windowed(seed: int) -> Script:
    """The script of ``seed`` on a model with layers that see a window."""
    return _windowed(write(seed), random.Random(f"windowed {seed}"), share=1.0)


def _windowed(script: Script, rng: random.Random, share: float = 0.3) -> Script:
    """``script``, now and then with layers that see a window; drawn apart, so that all else in it stays what it was."""
    settings = script.settings
    if rng.random() >= share:
        return script
    window, size = rng.choice((1, 2, 3, 5, 9, 20)), settings.page_size
    least = window + settings.step_tokens + 2 * size
    cells = least + int(rng.choice((0, 0.3, 1.0, 2.0)) * settings.max_running * (window + 2 * size))
    window_cells, chunked = -(-cells // size) * size, rng.random() < 0.4
    return replace(script, settings=replace(settings, window=window, window_cells=window_cells, chunked=chunked))


def storm(seed: int) -> Script:
    """The script of ``seed`` where everybody has an adapter, and operators load and unload them."""
    script = _adapted(_Writer(random.Random(seed)).write(), random.Random(f"storm {seed}"), storm=True)
    return _prefetched(script, random.Random(f"ahead {seed}"))


def _adapted(script: Script, rng: random.Random, storm: bool) -> Script:
    """``script`` with several adapters where it has one; drawn apart, so that all else in it stays what it was."""
    names = NAMES if storm else NAMES[: rng.randint(1, 4)]
    spaces = [i for i, ns in enumerate(NAMESPACES) if ns.adapter]
    events: list[Event] = []
    for event in script.events:
        if isinstance(event, Arrive) and (storm or event.request.namespace.adapter):
            space = rng.choice(spaces) if storm else event.seed % len(NAMESPACES)
            seed = event.seed - event.seed % len(NAMESPACES) + space
            params = event.request.params
            request = msgspec.structs.replace(
                event.request,
                namespace=msgspec.structs.replace(NAMESPACES[space], adapter=rng.choice(names)),
                params=params if params.seed is None else replace_params(params, seed=seed),
            )
            event = replace(event, request=request, seed=seed)
        events.append(event)
    last = max((event.step for event in events), default=0) + 10
    for _ in range(rng.randint(1, 20) if storm else 0):
        op = rng.choice(("load_adapter", "unload_adapter"))
        events.append(Operate(rng.randrange(last), op, rng.choice(names), rng.random() < 0.1))
    events.sort(key=lambda event: event.step)
    settings = replace(
        script.settings,
        adapter_places=rng.choice((1, 1, 2, 3)),
        slow_adapters=rng.random() < 0.7,
        lag=rng.choice((0, 1, 2)),
    )
    return Script(settings, events)


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._on = {name: rng.random() if rng.random() < 0.45 else 0.0 for name in FEATURES}
        # Faults hide what comes after them, so most runs are without.
        for name in ("poison", "transient", "row_failure", "too_long", "abort_all"):
            if rng.random() < 0.5:
                self._on[name] = 0.0
        self._page_size = rng.choice((1, 1, 2, 4, 16))
        self._long = rng.choice((12, 24, 40, 60))
        self._gate_count = rng.choice((1, 1, 2)) if self._on["gates"] else 0
        self._namespaces = rng.sample(range(len(NAMESPACES)), rng.randint(2, 4)) if self._on["namespaces"] else [0]
        self._stems = [self._ids(rng.randint(2, self._long)) for _ in range(rng.randint(1, 3))]
        self._arrivals: list[Arrive] = []
        self._names = ["a", "b", "c"][: rng.randint(1, 3)]
        self._budgets = {name: rng.choice((None, None, rng.randint(1, 60))) for name in self._names}
        self._programs: list[tuple[str, str]] = [("", "nobody")]

    def write(self) -> Script:
        rng = self._rng
        events: list[Event] = []
        steps = rng.choice((1, 10, 25))
        for _ in range(rng.randint(4, 15)):
            events += self._arrive(rng.randrange(steps))
        last = steps + 20
        rids = [a.request.rid for a in self._arrivals]
        for feature, make in (
            ("abort", lambda step: Abort(step, tuple(rng.choices([*rids, "nobody"], k=rng.randint(1, 2))))),
            ("flush", lambda step: Control(step, "flush_cache")),
            ("abort_all", lambda step: Control(step, "abort_all")),
            ("jump", lambda step: Jump(step, rng.choice((0.5, 10.0, 3600.0)))),
            ("program", lambda step: EndProgram(step, *rng.choice(self._programs), rng.random() < 0.4)),
            ("transient", lambda step: Fault(step, rng.choice(("before", "after")))),
        ):
            if self._on[feature]:
                most = 1 if feature == "abort_all" else 4
                events += [make(rng.randrange(last)) for _ in range(rng.randint(1, most))]
        events.sort(key=lambda event: event.step)
        return Script(self._settings(), events)

    def _settings(self) -> Settings:
        rng = self._rng
        need = max(len(a.request.ids) // 4 + (a.request.params.max_tokens or 1) for a in self._arrivals)
        pages = -(-need // self._page_size)
        cells = int(pages * rng.choice((1.0, 1.1, 1.3, 1.6, 2.0, 3.0))) * self._page_size
        if self._on["too_long"]:
            cells = max(self._page_size, cells * 2 // 3 // self._page_size * self._page_size)
        max_running = rng.choice((1, 2, 3, 4, 8, 16) if not self._on["pressure"] else (3, 4, 8, 16))
        settings = Settings(
            page_size=self._page_size,
            policy=self._policy(),
            eviction=rng.choice(("lru", "lru", "lfu", "fifo", "arc", "program"))
            if not self._on["program"] and not self._on["lease"]
            else "program",
            cache=rng.choice(("radix",) * 9 + ("none",)),
            depth=rng.choice((0, 0, 1, 1, 1, 2)),
            step_tokens=max_running + rng.choice((0, 1, 3, 8, 32, 128) if not self._on["pressure"] else (0, 1, 2, 5)),
            max_running=max_running,
            n_cells=cells,
            max_wait=rng.choice((0.0, 0.03, 0.2, 5.0)),
            headroom=rng.choice((HEADROOM_START, HEADROOM_FLOOR)),
            queue_requests=rng.randint(2, 12) if self._on["queue_bound"] else 100,
            jump=rng.random() < 0.8,
        )
        return replace(settings, mixed_tokens=rng.choice((None, rng.randint(1, settings.step_tokens))))

    def _policy(self) -> str:
        if self._on["program"]:
            return self._rng.choice(("program", "program", "lpm"))
        if self._on["priority"]:
            return "priority"
        return self._rng.choice(("lpm", "lpm", "fcfs", "dfs", "random", "priority", "program"))

    # -- arrivals

    def _maybe(self, feature: str) -> bool:
        return self._rng.random() < self._on[feature]

    def _ids(self, n: int) -> list[int]:
        # Few different tokens, so that unrelated prompts agree by chance now and then.
        return [self._rng.randint(1, VOCAB - 1) for _ in range(n)]

    def _prompt(self, step: int) -> tuple[list[int], int | None, int]:
        """A prompt, the seed that its continuation needs or None, and its step."""
        rng = self._rng
        if self._arrivals:
            other = rng.choice(self._arrivals)
            ids = other.request.prompt.tolist()
            if self._maybe("duplicate"):
                return ids, other.seed, step
            if self._maybe("prefix") and len(ids) > 1:
                return ids[: rng.randint(1, len(ids) - 1)], other.seed, step
            if self._maybe("follow_up"):
                answer = expect(other.request, other.seed).tokens[: rng.randint(1, 12)]
                turn = (ids + answer + self._ids(rng.randint(0, 6)))[: CONTEXT - 1]
                return turn, other.seed, step + rng.choice((0, 10, 30))
        tail = self._ids(rng.randint(1, max(1, self._long // 2)))
        stem = rng.choice(self._stems) if self._maybe("shared") else []
        ids = stem + tail
        if rng.random() < 0.3:
            # Lengths around a page boundary.
            n = max(1, len(ids) // self._page_size * self._page_size + rng.choice((-1, 0, 1)))
            ids = (ids + self._ids(self._page_size + 1))[:n]
        return ids, None, step

    def _arrive(self, step: int) -> list[Event]:
        rng = self._rng
        prompt, kin, step = self._prompt(step)
        # Relatives mostly stay in one namespace; now and then the same tokens appear in another one.
        space = kin % len(NAMESPACES) if kin is not None and rng.random() < 0.7 else rng.choice(self._namespaces)
        count = rng.randint(2, 5) if self._maybe("burst") else 1
        made: list[Event] = []
        rules = self._rules()
        params = self._params(prompt, space, rules)
        for _ in range(count):
            serial = len(self._arrivals)
            seed = (serial + 1) * len(NAMESPACES) + space
            if params.seed is not None:
                params = replace_params(params, seed=seed)
            rid = f"r{serial}"
            if self._arrivals and self._maybe("reuse_rid"):
                rid = rng.choice(self._arrivals).request.rid
            request = Request(
                rid=rid,
                ids=np.array(prompt, dtype="<i4").tobytes(),
                params=params,
                namespace=NAMESPACES[space],
                priority=rng.randint(-2, 2) if self._maybe("priority") else 0,
                timeout=rng.choice((0.05, 0.2, 1.0, 30.0)) if self._maybe("timeout") else None,
                program=self._program(NAMESPACES[space].tenant, count),
                lease=Lease(ttl=rng.choice((0.05, 1.0, 1e6))) if self._maybe("lease") else None,
                **rules,
            )
            arrival = replace(Arrive(step, request, seed), **self._misfortunes(len(prompt), params.max_tokens or 0))
            self._arrivals.append(arrival)
            made.append(arrival)
        return made

    def _misfortunes(self, n_prompt: int, n_new: int) -> dict[str, Any]:
        rng = self._rng
        out: dict[str, Any] = {}
        if self._maybe("quit"):
            out["quit_after"] = rng.randint(0, max(1, n_new))
        if self._gate_count and self._maybe("gates"):
            out["gates"] = tuple(
                (rng.choice((-1, 0, 0, 1, 3, 15)), rng.random() < 0.25) for _ in range(self._gate_count)
            )
        if self._on["poison"] and rng.random() < 0.2:
            out["poison_at"] = rng.randrange(n_prompt + n_new)
        if self._on["row_failure"] and rng.random() < 0.2:
            out["fail_at"] = n_prompt + rng.randrange(max(1, n_new))
        return out

    def _program(self, tenant: str, count: int) -> Program | None:
        """The envelope of one of ``count`` requests that come together."""
        rng = self._rng
        if not self._maybe("program"):
            return None
        name = rng.choice(self._names)
        self._programs.append((tenant, name))
        return Program(
            id=name,
            next_uses=rng.choice((None, None, 0, 2)),
            fork=rng.choice(("", "f")) if count > 1 else "",
            width=count,
            pause=rng.choice((None, 0.0, 0.5, 100.0)),
            priority=rng.choice((0, 0, 3)),
            deadline=rng.choice((None, None, 1.0)),
            budget=self._budgets[name],
            end=rng.random() < 0.1,
        )

    def _rules(self) -> dict[str, Any]:
        """Constraint and reasoning of a request; few different constraints, so that compiles are shared."""
        rng = self._rng
        rules: dict[str, Any] = {}
        if self._maybe("constraint"):
            which = rng.randrange(8)
            mood = random.Random(f"{self._page_size}/{which}")
            breaks = mood.randrange(12) if mood.random() < 0.15 else -1
            rules["constraint"] = constraint(which, mood.choice((0, 0, 1, 4, 20)), mood.random() < 0.12, breaks)
        if self._maybe("reasoning"):
            tag = [rng.choice((7, 8)) for _ in range(rng.randint(1, 3))]
            rules["reasoning"] = Reasoning(end=tuple(tag), budget=rng.choice((0, 1, 5, None)))
        return rules

    def _params(self, prompt: list[int], space: int, rules: dict[str, Any]) -> SamplingParams:
        rng = self._rng
        room = CONTEXT - len(prompt)
        # Answers that are long against their prompts and the pool outrun what admission left room for.
        n = min(room, rng.choice((1, 2, 6, 14, 24)) if not self._maybe("pressure") else rng.randint(20, 60))
        ignore_eos = rng.random() < 0.6 + self._on["pressure"]
        options: dict[str, object] = {"max_tokens": n, "temperature": 0.0, "ignore_eos": ignore_eos}
        if self._maybe("sampling"):
            options |= {"temperature": 1.0, "seed": rng.choice((0, None))}
        if self._maybe("logprobs"):
            options["logprobs"] = 0
        if self._maybe("prompt_logprobs"):
            options |= {"prompt_logprobs": 0, "logprob_start": rng.choice((0, 0, 1, rng.randint(0, len(prompt))))}
            if rng.random() < 0.3:
                options["max_tokens"] = n = 0
        elif rng.random() < 0.05:
            options["max_tokens"] = None
        if n and self._maybe("min_tokens"):
            options["min_tokens"] = rng.randint(0, n)
        draft = SamplingParams(**{**options, "ignore_eos": True, "max_tokens": n})  # type: ignore[arg-type]
        wire = Request(rid="draft", ids=np.array(prompt, dtype="<i4").tobytes(), params=draft, **rules)
        likely = expect(wire, space).tokens if n else []
        if likely and self._maybe("stop_ids"):
            options["stop_token_ids"] = tuple(rng.choices(likely, k=rng.choice((1, 2))) + self._ids(rng.choice((0, 9))))
        if likely and self._maybe("stop_strings"):
            text = "".join(map(text_of, likely))
            begin = rng.randrange(len(text))
            options["stop"] = tuple({text[begin : begin + rng.randint(1, 4)]: None, "dx": None})
        return SamplingParams(**options)  # type: ignore[arg-type]


def replace_params(params: SamplingParams, seed: int) -> SamplingParams:
    """``params`` with its own seed."""
    return SamplingParams(**{**{name: getattr(params, name) for name in params.__struct_fields__}, "seed": seed})
