"""Forks, joins and batches in the frontend language, as the programs of ``programs.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .programs import case, raised


@case
def fork_variables(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "shared "
        s["before"] = 1
        s.sync()
        forks = s.fork(2)
        for i, f in enumerate(forks):
            f += f"branch {i}"
            f["own"] = i
            f["before"] = 7
        texts = [f.text() for f in forks]
        forks.join()
        s["texts"] = texts
        one = s.fork(1)
        one[0] += "x"
        one[0]["single"] = "v"
        one.join()

    s = p.run(backend=backend)
    return [s["own"], s["before"], s["texts"], s["single"], s.text()]


@case
def fork_threads(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "Tips: "
        s.sync()
        forks = s.fork(3, position_ids_offset=[1, 2, 3])
        forks += lambda i: f"{i} " + sgl.gen("tip", 2)
        forks += sgl.gen("more", 1)
        forks += ["x", "yy", "zzz"]
        forks.join()
        s += sgl.gen("end", 1)

    s = p.run(backend=backend)
    return [s["tip"], s["more"], s["end"], s.text()]


@case
def fork_in_role(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += sgl.user_begin() + "open"
        s.sync()
        forks = s.fork(2)
        for i, f in enumerate(forks):
            f += f" {i}" + sgl.user_end()
        s["messages"] = [f.messages() for f in forks]

    return p.run(backend=backend)["messages"]


@case
def fork_without_text(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        forks = s.fork(2)
        forks += sgl.user("a")
        forks.join()

    return p.run(backend=backend).text()


@case
def join_text(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "head "
        forks = s.fork(2)
        forks += lambda i: f"part{i} "
        forks.join("concate_and_append")
        s += "tail"

    return p.run(backend=backend).text()


@case
def group_add(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        forks = s.fork(2)

        def add(value: Any) -> Callable[[], None]:
            def work() -> None:
                nonlocal forks
                forks += value

            return work

        s["kinds"] = [raised(add("text")), raised(add(sgl.user("u"))), raised(lambda: forks.join("other")),
                      raised(lambda: forks[5])]  # fmt: skip

    return p.run(backend=backend)["kinds"]


@case
def copying(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "a"
        with s.copy() as c:
            c += "b" + sgl.gen("new", 1)
        s += "c"

    s = p.run(backend=backend)
    return [s["new"], s.text()]


@case
def batch(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, q: Any, k: Any = 1) -> Any:
        s += q + sgl.gen("a", k)
        return q

    states = p.run_batch([{"q": "one"}, {"q": "three", "k": 2}, {"q": "twenty"}], backend=backend, temperature=0)
    return [[s["a"], s.ret_value] for s in states]


@case
def batch_lists(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, q: Any, k: Any = 1) -> None:
        s += q + sgl.gen("a", k)

    states = p.run_batch([["one"], ("three", 2)], backend=backend, num_threads=2)
    return [[s["a"] for s in states], p.run_batch([], backend=backend),
            raised(lambda: p.run_batch(["abc"], backend=backend)), raised(lambda: p.run_batch([[]], backend=backend)),
            raised(lambda: p.run_batch((x for x in [["a"]]), backend=backend))]  # fmt: skip


@case
def batch_generator(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, q: Any) -> None:
        s += q + sgl.gen("a", 1)

    states = p.run_batch([{"q": "x" * i} for i in range(1, 9)], backend=backend, generator_style=True)
    return [s["a"] for s in states]


@case
def batch_precache(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, q: Any) -> None:
        s += "A constant beginning that is clearly longer than sixty-four characters of text. "
        s += sgl.user(q) + sgl.assistant(sgl.gen("a", 1))

    p.cache(backend=backend)
    return [s["a"] for s in p.run_batch([{"q": "one"}, {"q": "three"}], backend=backend)]
