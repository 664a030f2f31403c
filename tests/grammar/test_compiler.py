"""One compile per constraint, whatever comes when; bounds on what is kept; refusals before any parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest

from bough.base.constraint import Constraint
from bough.base.errors import BoughError, InvalidRequest
from bough.base.limits import DEFAULT_LIMITS, Limits
from bough.grammar.admission import check_constraint
from bough.grammar.base import Template
from bough.grammar.compiler import GrammarCompiler
from tests.sim.grammar import FakeBackend, constraint, tags

WIDE: dict[str, dict[str, dict[str, str]]] = {"properties": dict.fromkeys(map(str, range(2000)), {})}


@dataclass
class Job:
    """A compile that ends when it is told to."""

    work: Callable[[], Template]
    over: bool = False

    def done(self) -> bool:
        return self.over

    def result(self) -> Template:
        return self.work()


class Jobs(list[Job]):
    def submit(self, work: Callable[[], Template]) -> Job:
        self.append(Job(work))
        return self[-1]


def made(limits: Limits = DEFAULT_LIMITS, threads: int = 2) -> tuple[GrammarCompiler, Jobs]:
    jobs = Jobs()
    return GrammarCompiler(FakeBackend(), limits, jobs.submit, threads, tags()), jobs


def test_those_who_come_together_share_one_compile() -> None:
    compiler, jobs = made()
    first, second = compiler.start(constraint(1)), compiler.start(constraint(1))
    other = compiler.start(constraint(2))
    assert len(jobs) == compiler.compiled == 2 and first.poll() is second.poll() is None
    jobs[0].over = True
    compiler.collect()
    assert first.poll() is second.poll() is not None and other.poll() is None
    assert compiler.start(constraint(1)).poll() is first.poll() and len(jobs) == 2


def test_a_refusal_is_remembered() -> None:
    compiler, jobs = made()
    bad = constraint(1, fails=True)
    ticket = compiler.start(bad)
    jobs[0].over = True
    with pytest.raises(InvalidRequest, match="no beginning"):
        compiler.start(bad)
    with pytest.raises(InvalidRequest, match="no beginning"):
        ticket.poll()
    assert len(jobs) == 1


def test_an_accident_is_not_remembered() -> None:
    compiler, jobs = made()

    def crash() -> Template:
        raise RuntimeError("a bug")

    ticket = compiler.start(constraint(1))
    jobs[0].work, jobs[0].over = crash, True
    compiler.collect()
    with pytest.raises(BoughError, match="RuntimeError"):
        ticket.poll()
    again = compiler.start(constraint(1))
    jobs[1].over = True
    compiler.collect()
    assert again.poll() is not None


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    compiler, jobs = made(replace(DEFAULT_LIMITS, grammar_cache_bytes=3000))

    def use(which: int) -> bool:
        """Whether it had to be compiled."""
        before = len(jobs)
        compiler.start(constraint(which))
        for job in jobs[before:]:
            job.over = True
        compiler.collect()
        return len(jobs) > before

    assert [use(i) for i in (1, 2, 3)] == [True] * 3
    assert not use(1)
    assert use(4)
    assert [use(i) for i in (1, 3, 4)] == [False] * 3
    assert use(2)


def large(which: int) -> Constraint:
    return Constraint(kind="regex", text=f"{which} " + "x" * 20_000)


def order(compiler: GrammarCompiler, jobs: Jobs) -> list[str]:
    """What the compiles that begin are of, as one after the other ends."""
    begun: list[str] = []
    while any(not job.over for job in jobs):
        job = next(job for job in jobs if not job.over)
        assert isinstance(job.work, partial)
        begun.append(
            job.work.args[0].text[:6].strip("x ") if len(job.work.args[0].text) > 99 else job.work.args[0].text
        )
        job.work, job.over = (lambda: FakeBackend().compile(constraint(1))), True
        compiler.collect()
    return begun


def small(which: int) -> Constraint:
    return Constraint(kind="regex", text=f"s{which}")


def test_who_has_a_template_takes_no_other_compile_along() -> None:
    """The template is gone from the cache when the same constraint comes again."""
    compiler, jobs = made(replace(DEFAULT_LIMITS, grammar_cache_bytes=1))
    first = compiler.start(small(0))
    for i in (1, 2, 3):
        compiler.start(small(i))
    order(compiler, jobs)
    compiler.start(small(4)), compiler.start(small(5))
    again = compiler.start(small(0))
    assert first.poll() is not None and again.poll() is None and again is not first
    compiler.drop(first)
    order(compiler, jobs)
    assert again.poll() is not None


def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    compiler, jobs = made()
    tickets = [compiler.start(small(i)) for i in (0, 1, 2, 3, 4, 3)]
    assert len(jobs) == 2
    for i in (0, 2, 3):  # one runs, one is given up, of one only one waiter goes
        compiler.drop(tickets[i])
    assert order(compiler, jobs) == ["s0", "s1", "s3", "s4"]
    assert tickets[2].poll() is None and tickets[5].poll() is not None
    again = compiler.start(small(2))
    assert order(compiler, jobs) == ["s2"] and again.poll() is not None


def test_tenants_take_turns() -> None:
    compiler, jobs = made()
    for i in range(6):
        compiler.start(small(i), "a")
    compiler.start(small(10), "b")
    compiler.start(small(20), "c")
    compiler.start(small(11), "b")
    assert order(compiler, jobs) == ["s0", "s1", "s2", "s10", "s20", "s3", "s11", "s4", "s5"]


def test_what_several_tenants_want_is_done_at_the_first_turn_of_any() -> None:
    compiler, jobs = made()
    for i in range(6):
        compiler.start(small(i), "a")
    shared = compiler.start(small(5), "b")
    compiler.start(small(10), "b")
    assert order(compiler, jobs) == ["s0", "s1", "s2", "s5", "s3", "s10", "s4"] and shared.poll() is not None


def test_large_ones_leave_a_thread_to_the_others() -> None:
    compiler, jobs = made()
    for i in range(4):
        compiler.start(large(i))
    assert len(jobs) == 1
    for i in range(3):
        compiler.start(small(i))
    assert len(jobs) == 2
    assert order(compiler, jobs) == ["0", "s0", "1", "s1", "2", "s2", "3"]


def chain(n: int) -> str:
    return "\n".join(["start: a0", *(f'?a{i}.1: "x" a{i + 1}' for i in range(n)), f'a{n}: "x"'])


def test_rules_that_are_many_or_circular_are_no_chain() -> None:
    flat = "\n".join(
        ["start: " + " | ".join(f"a{i}" for i in range(3000)), *(f'a{i}: "x" start?' for i in range(3000))]
    )
    for text in (chain(190), flat, 'start: a\na: b | "x"\nb: a start "y"', "start: /a:b/", "x" * 100_000):
        check_constraint(Constraint(kind="grammar", text=text), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (Constraint(kind="json_schema", text="[" * 10_000), "deep"),
        (Constraint(kind="json_schema", text='{"a":' * 200 + "1" + "}" * 200), "deep"),
        (Constraint(kind="regex", text="(" * 60_000), "deep"),
        (Constraint(kind="regex", text="a" * (1 << 20)), "bytes"),
        (Constraint(kind="regex", text=""), "empty"),
        (Constraint(kind="regex", text="a\0b"), "NUL"),
        (Constraint(kind="regex", text="\ud800"), "Unicode"),
        (Constraint(kind="json_schema", text="{}", whitespace=" |" * 200), "256 characters"),
        *(
            (Constraint(kind="json_schema", text="{}", whitespace=pattern), "white space")
            for pattern in ("a", "[^a]", ".", r"\w", r"\S", r"[\t-z]", "(?i: )", r"\p{L}", r"[ \"]", "{", "x*", "\x0b")
        ),
        (Constraint(kind="json_schema", text="3"), "object"),
        (Constraint(kind="json_schema", text="{"), "JSON"),
        (Constraint(kind="choice", text='["a", 1]'), "strings"),
        (Constraint(kind="choice", text='"abc"'), "strings"),
        (Constraint(kind="choice", text=str(["a"] * 30_000).replace("'", '"')), "choice has 30000"),
        (Constraint(kind="json_schema", text=f'{{"enum": {list(range(30_000))}}}'), "enum has 30000"),
        (
            Constraint(kind="json_schema", text=json.dumps(WIDE)),
            "properties has 2000",
        ),
        (Constraint(kind="json_schema", text='{"items": {"minItems": 5000}}'), "minItems is 5000"),
        (
            Constraint(kind="json_schema", text=json.dumps({"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(600)]})),
            "ref has more than 500 targets",
        ),
        (
            Constraint(
                kind="structural_tag",
                text=json.dumps({"triggers": ["<"], "structures": [{"begin": "<"}] * 300}),
            ),
            "structures has 300",
        ),
        (Constraint(kind="grammar", text=chain(300)), "more than 200 deep"),
        (Constraint(kind="grammar", text='start: a b\na: %json {}\nb: %json\n {"minItems": 9999}'), "minItems is 9999"),
        (Constraint(kind="grammar", text=f"start: %json {json.dumps(WIDE)}"), "properties has 2000"),
        (
            Constraint(
                kind="structural_tag",
                text=json.dumps({
                    "triggers": ["<"],
                    "structures": [{"begin": "<", "grammar": f"start: %json {json.dumps(WIDE)}", "end": ">"}],
                }),
            ),
            "properties has 2000",
        ),
        (Constraint(kind="json_schema", text='{"items": {"const": {"minimum": [-9223372036854775808]}}}'), "const has"),
        (Constraint(kind="json_schema", text='{"allOf": [{"type": "integer"}, {"enum": [1, -1e30]}]}'), "enum has"),
        (Constraint(kind="json_schema", text='{"type": [], "exclusiveMaximum": -9.1e18}'), "exclusiveMaximum has"),
        (Constraint(kind="json_schema", text='{"type": "integer", "multipleOf": 12345.678}'), "digits: 12345.678"),
        (Constraint(kind="json_schema", text='{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}'), "digits: 99"),
        (Constraint(kind="grammar", text='start: %json {"maximum": -9223372036854775808}'), "maximum has"),
        (Constraint(kind="grammar", text="\n".join(f'r{i} ::= "a"' for i in range(600))), "EBNF has 600"),
    ],
)  # fmt: skip
def test_what_costs_too_much_is_refused_before_any_parser(bad: Constraint, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        check_constraint(bad, DEFAULT_LIMITS)
    assert caught.value.param == bad.kind and caught.value.status == 400


@pytest.mark.parametrize("pattern", [" ", "", r"[\n\t ]*", r"\s*", "( |\n)?", r"(?:\r\n|\n)+[ ]{0,8}", "free"])
def test_patterns_of_white_space(pattern: str) -> None:
    check_constraint(Constraint(kind="json_schema", text="{}", whitespace=pattern), DEFAULT_LIMITS)


def test_multiples_that_are_cheap_to_count_pass() -> None:
    steps: list[float] = [0.01, 5, 60, 7, 1e-9, 1000, 4096, 0.25, 1e300]
    text = json.dumps({"anyOf": [{"multipleOf": step} for step in steps]})
    check_constraint(Constraint(kind="json_schema", text=text), DEFAULT_LIMITS)
