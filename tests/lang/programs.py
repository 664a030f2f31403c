"""Programs in the frontend language, written once for SGLang's module and for ours.

Each takes the module (or its alias), a backend and a stub server's URL, and returns what can be observed of it as
JSON. What SGLang 0.5.23 answers is in ``recorded.json``; ``record.py`` made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

CASES: dict[str, Callable[..., Any]] = {}

UNORDERED = {"fork_threads", "batch", "batch_lists", "batch_generator", "batch_precache", "group_add", "called"}
"""Cases whose requests come beside each other."""


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def raised(work: Callable[[], Any]) -> str:
    """Which kind of exception ``work`` raises."""
    try:
        work()
    except Exception as error:
        kinds = [k.__name__ for k in type(error).__mro__]
        return next(k for k in kinds if k in ("AssertionError", "ValueError", "TypeError", "KeyError", "RuntimeError",
                                              "AttributeError", "error", "Exception"))  # fmt: skip
    return "nothing"


@case
def completion(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def qa(s: Any, question: Any, hint: str = "none") -> Any:
        s += "Q: " + question + " (" + hint + ")\nA:"
        s += sgl.gen("answer", max_tokens=2, stop="\n") + "\n"
        s += "B:" + sgl.gen("more", 3, temperature=0.5, top_k=3, min_p=0.1, ignore_eos=True, stop=["x", "y"])
        return s["answer"] + "!"

    s = qa.run("why", backend=backend, temperature=0.25, max_new_tokens=7, stop_token_ids=[5], stop_regex="a+")
    return [s["answer"], s["more"], s.text(), s.messages(), s.ret_value, repr(s), "answer" in s, "no" in s,
            s.error(), s.get_meta_info("answer")["completion_tokens"], s.get_meta_info("unknown")]  # fmt: skip


@case
def all_options(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "x" + sgl.gen("a", min_tokens=1, presence_penalty=0.5, frequency_penalty=0.25, top_p=0.5,
                           stop_token_ids=[1], stop_regex="b", return_logprob=True, logprob_start_len=0,
                           top_logprobs_num=2, return_text_in_logprobs=True)  # fmt: skip
        s += sgl.gen("b", regex="[a-z]+", json_schema='{"type": "object"}')

    s = p.run(backend=backend)
    return [s["a"], s["b"], s.get_meta_info("a")["output_token_logprobs"]]


@case
def dtypes(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "n " + sgl.gen_int("i") + sgl.gen("f", dtype=float) + sgl.gen("b", dtype="bool") + sgl.gen_string("t")
        s += sgl.gen("j", dtype="int", stop=["!"])

    s = p.run(backend=backend)
    return [s["i"], s["f"], s["b"], s["t"], s["j"], type(s["i"]).__name__]


@case
def roles(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def chat(s: Any) -> None:
        s += sgl.system("Be brief.")
        s += sgl.user("  hello  ")
        s += sgl.assistant(sgl.gen("a"))
        with s.user():
            s += "and"
            s += " now"
        with s.assistant():
            s += "Well," + sgl.gen("b", 1)
        s.user("third")
        s += sgl.assistant_begin() + sgl.gen("c") + sgl.assistant_end()

    s = chat.run(backend=backend)
    return [s.text(), s.messages()]


@case
def default_system(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def chat(s: Any) -> None:
        s += sgl.user("hi") + sgl.assistant(sgl.gen("a", stop="X"))

    s = chat.run(backend=backend)
    return [s.text(), s.messages()]


@case
def nested_roles(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def chat(s: Any) -> None:
        with s.user():
            s += "a"
            with s.assistant():
                pass

    return type(chat.run(backend=backend).error()).__name__


@case
def role_left_by_exception(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def chat(s: Any) -> None:
        try:
            with s.user():
                s += "a"
                raise LookupError
        except LookupError:
            s += "b"

    s = chat.run(backend=backend)
    return [s.text(), s.messages()]


@case
def role_twice(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def chat(s: Any) -> None:
        s += s.system("x")

    s = chat.run(backend=backend)
    return [s.text(), s.messages()]


@case
def unnamed(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "a" + sgl.gen(max_tokens=1) + "bb" + sgl.gen(max_tokens=2)

    s = p.run(backend=backend)
    return [s.text(), s[None]]


@case
def scopes(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        with s.var_scope("outer"):
            s += "one "
            with s.var_scope("inner"):
                s += "two" + sgl.gen("g", 1)
            s += " three"
        s["set"] = 5
        s.set_var("too", [1])

    s = p.run(backend=backend)
    return [s["outer"], s["inner"], s["set"], s.get_var("too"), s.text()]


@case
def what_can_be_appended(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def nothing(s: Any) -> None:
        s += None

    @sgl.function
    def number(s: Any) -> None:
        s += "a"
        s += 5

    return [raised(lambda: nothing.run(backend=backend)), type(number.run(backend=backend).error()).__name__]


@case
def selecting(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "The answer is" + sgl.select("a", [" yes indeed", " no", " maybe so or not"])
        s += "\nAnd" + sgl.gen("b", choices=[" one", " three four"], choices_method=sgl.greedy_token_selection)
        s += "\nSo" + sgl.select("c", [" x", " yy zz"], choices_method=sgl.unconditional_likelihood_normalized)

    s = p.run(backend=backend)
    rounded = {name: s.get_meta_info(name) for name in "abc"}
    return [s["a"], s["b"], s["c"], s.text(), rounded]


@case
def select_needs_greedy(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "a" + sgl.select("a", ["b", "c"], temperature=0.7)

    return [type(p.run(backend=backend).error()).__name__, raised(lambda: sgl.select("a"))]


@case
def streaming(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "abc" + sgl.gen("a") + " mid" + sgl.select("c", [" x", " yy"]) + sgl.gen("b", 2)

    s = p.run(backend=backend, stream=True)
    whole = "".join(s.text_iter())
    t = p.run(backend=backend, stream=True)
    pieces = list(t.text_iter("a"))
    t.sync()
    plain = p.run(backend=backend)
    return [whole, s["a"], s["b"], s["c"], "".join(pieces), list(plain.text_iter()), list(plain.text_iter("b"))]


@case
def streaming_logprobs(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "abc" + sgl.gen("a", return_logprob=True)

    async def follow() -> Any:
        s = p.run(backend=backend, stream=True)
        text, rows, last = "", [], None
        async for piece, meta in s.text_async_iter("a", return_meta_data=True):
            text += piece
            rows += meta["output_token_logprobs"]
            last = meta["output_token_logprobs_length"]
        return [text, rows, last]

    return asyncio.run(follow())


@case
def stream_of_unknown(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "a"

    return list(p.run(backend=backend, stream=True).text_iter("nothing"))


@case
def synchronous(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "a" + sgl.gen("a")

    @sgl.function
    def q(s: Any) -> None:
        s += "FAIL" + sgl.gen("a")

    s = p.run(backend=backend, use_thread=False)
    return [s["a"], s.text(), raised(lambda: q.run(backend=backend, use_thread=False))]


@case
def binding(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, a: Any, b: Any) -> None:
        s += a + b + sgl.gen("x", 1)

    bound = p.bind(b="bound")
    state = bound.run(a="call ", backend=backend)
    both = bound.run(a="call ", b="other", backend=backend)
    return [state.text(), both.text(), raised(lambda: p.bind(c=1)), bound.bind_arguments, p.arg_names,
            list(p.arg_defaults)]  # fmt: skip


@case
def definitions(sgl: Any, backend: Any) -> Any:
    def bad() -> None:
        @sgl.function
        def p(state: Any) -> None: ...

    @sgl.function(num_api_spec_tokens=9)
    def spec(s: Any, x: Any = 3) -> None: ...

    return [raised(bad), spec.num_api_spec_tokens, spec.bind(x=2).num_api_spec_tokens,
            raised(lambda: sgl.gen(regex="(")), raised(lambda: spec.run_batch("ab")),
            raised(lambda: spec.run())]  # fmt: skip


@case
def expressions(sgl: Any, backend: Any) -> Any:
    text = "a" + sgl.gen("g") + "b" + sgl.select("c", ["x"]) + sgl.user("u")
    reasoning = sgl.separate_reasoning(sgl.assistant(sgl.gen("r")), model_type="qwen3")
    return [
        repr(text).split("choices_method")[0], repr(sgl.gen()), repr(sgl.gen_int("i")), repr(sgl.user_begin()),
        repr(sgl.assistant_end()), repr(sgl.image("p")), repr(sgl.video("p", 2)), repr(sgl.system()),
        reasoning.expr_list[1].name, repr(reasoning.expr_list[1]),
        raised(lambda: sgl.gen("a") + 5), raised(lambda: 5 + sgl.gen("a")),
        vars(sgl.gen("n", choices=["a"], max_tokens=3, temperature=0.5))["temperature"],
    ]  # fmt: skip


@case
def failing(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "good" + sgl.gen("a", 1)
        s += " FAIL" + sgl.gen("b", 1)

    s = p.run(backend=backend)
    error = s.error()
    return [type(error).__mro__[-4].__name__ in ("RuntimeError", "Exception", "BaseException"), isinstance(
        error, RuntimeError), str(error), s["a"], raised(lambda: s["b"]), s.text()]  # fmt: skip


@case
def failing_body(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "a"
        raise ZeroDivisionError

    try:
        p.run(backend=backend)
    except ZeroDivisionError:
        return "raised"


@case
def missing(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "a"

    return raised(lambda: p.run(backend=backend)["nothing"])


@case
def images(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, data: Any) -> None:
        s += sgl.user(sgl.image(data) + "what") + sgl.assistant(sgl.gen("a", 1))

    @sgl.function
    def two(s: Any, data: Any) -> None:
        s += sgl.image(data) + sgl.image(data) + sgl.gen("a", 1)

    s = p.run(data=b"\x89PNG", backend=backend)
    return [s["a"], s.messages(), type(two.run(data=b"1", backend=backend).error()).__name__]


@case
def tracing(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def inner(s: Any, x: Any) -> None:
        s += "inner"

    @sgl.function
    def p(s: Any, q: Any) -> None:
        s += "Start " + q + sgl.gen("a")
        forks = s.fork(2)
        forks += sgl.gen("f")
        s += "x" + s["a"]

    @sgl.function
    def formatted(s: Any, q: Any) -> None:
        s += f"{q}"

    @sgl.function
    def compared(s: Any, q: Any) -> None:
        if q > 3:
            s += "a"

    tracer = p.trace(backend=backend)
    graph = tracer.last_node.print_graph_dfs()
    lines = [line.partition(" = ")[2] for line in graph.splitlines()][:2]
    return [[line.partition(" + ")[2] or line for line in lines], len(tracer.child_states),
            raised(lambda: formatted.trace(backend=backend)), raised(lambda: compared.trace(backend=backend)),
            [type(n).__name__ for n in tracer.flatten_nodes()][:4]]  # fmt: skip


@case
def control(sgl: Any, backend: Any) -> Any:
    sgl.set_default_backend(None)
    none = [sgl.flush_cache(), sgl.get_server_info()]
    sgl.set_default_backend(backend)
    found = [sgl.flush_cache(), sgl.get_server_info()]

    @sgl.function
    def p(s: Any) -> None:
        s += "a" + sgl.gen("x", 1)

    found.append(p.run()["x"])
    sgl.set_default_backend(None)
    return [none, found, raised(lambda: p.run()), backend.get_model_name()]
