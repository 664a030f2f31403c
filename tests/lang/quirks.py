"""More programs in the frontend language, of what is seldom used but observable, as those of ``programs.py``."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from typing import Any

from .openai_stub import answering
from .programs import case, raised

PARTS = {
    "chat_template": ("chat_template", "templates"), "global_config": ("global_config", "config"),
    "state": ("interpreter", "state"), "runtime": ("backend.runtime_endpoint", "backends.runtime"),
    "openai": ("backend.openai", "backends.openai"), "ir": ("ir", "ir"),
}  # fmt: skip
"""Parts of the language -> their modules, SGLang's and ours."""

PATHS = (
    "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3-Base", "OrionStarAI/Orion-14B-Chat",
    "deepseek-ai/Janus-Pro-7B", "databricks/dbrx-instruct", "lmsys/vicuna-7b-v1.5", "liuhaotian/llava-v1.5-7b",
    "lmms-lab/LLaVA-NeXT-Video-7B", "meta-llama/Llama-2-13b-chat-hf", "codellama/CodeLlama-7b-Instruct-hf",
    "mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mistral-community/pixtral-12b",
    "meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen1.5-7B-Chat",
    "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-8B",
    "zai-org/GLM-4.5V", "01-ai/Yi-1.5-9B-Chat", "01-ai/Yi-VL-6B", "google/gemma-2-2b-it", "google/gemma-3-4b-it",
    "google/gemma-4-4b-it", "CohereForAI/c4ai-command-r-v01", "ibm-granite/granite-3.0-8b-instruct",
    "openbmb/MiniCPM-V-2_6", "openbmb/MiniCPM-o-2_6", "OpenGVLab/InternVL2_5-8B", "internlm/Intern-S1",
    "lmms-lab/llama3-llava-next-8b", "liuhaotian/llava-v1.6-34b", "moonshotai/Kimi-VL-A3B-Instruct",
    "openai/gpt-oss-20b", "gpt-4o", "claude-3-haiku", "HuggingFaceTB/SmolLM2-135M-Instruct", "microsoft/Phi-4",
)  # fmt: skip


def part(sgl: Any, name: str) -> Any:
    """A module of the language."""
    theirs, ours = PARTS[name]
    return importlib.import_module(f"sglang.lang.{theirs}" if sgl.__name__ == "sglang" else f"bough.lang.{ours}")


def numbered(graph: str) -> str:
    """The lines of a graph with the numbers of its nodes in the order of their appearance."""
    seen: dict[str, str] = {}
    return re.sub(r"%\d+", lambda found: seen.setdefault(found[0], f"%{len(seen)}"), graph)


def after(state: Any) -> Any:
    """``state``, when all of it is done."""
    state.sync()
    return state


BEYOND = {
    "function": ["limits", "retry", "priority"], "gen": ["type", "reask", "validate", "lora_path"],
    "select": ["lora_path"], "join": ["name", "valid", "key", "until"], "get_meta_info": ["timeout"],
}  # fmt: skip
"""Parameters that SGLang has not."""


@case
def signatures(sgl: Any, backend: Any) -> Any:
    def parameters(call: Any, name: str) -> Any:
        return [[p.name, p.kind.name, plain(p.default)] for p in inspect.signature(call).parameters.values()
                if p.name not in BEYOND.get(name, ())]  # fmt: skip

    def plain(value: Any) -> str:
        return "none" if value is inspect.Parameter.empty else repr(value).partition(" object at")[0].rpartition(".")[2]

    words = ("function gen gen_int gen_string select image video system user assistant system_begin system_end "
             "user_begin user_end assistant_begin assistant_end separate_reasoning set_default_backend flush_cache "
             "get_server_info").split()  # fmt: skip
    found = {name: parameters(getattr(sgl, name), name) for name in words}
    # SGLang's image is its node's class, and the parameters of the class are those of ours.
    state, group = part(sgl, "state").ProgramState, part(sgl, "state").ProgramStateGroup
    of = {
        sgl.function(lambda s: None): "run run_batch bind trace cache __call__",
        state: "system user assistant var_scope fork text messages sync error text_iter text_async_iter get_var "
               "set_var get_meta_info __getitem__ __setitem__ __contains__",
        group: "join __getitem__",
        sgl.RuntimeEndpoint: "__init__ get_model_name get_chat_template cache_prefix flush_cache get_server_info "
                             "start_profile stop_profile shutdown",
        part(sgl, "runtime").Runtime: "__init__ shutdown cache_prefix get_tokenizer generate async_generate "
                                      "add_request encode get_server_info",
        part(sgl, "openai").OpenAI: "__init__",
    }  # fmt: skip
    for owner, names in of.items():
        kind = getattr(owner, "__name__", type(owner).__name__)
        found |= {f"{kind}.{name}": parameters(getattr(owner, name), name) for name in names.split()}
    return found


@case
def constants(sgl: Any, backend: Any) -> Any:
    ir, settings = part(sgl, "ir"), part(sgl, "global_config").GlobalConfig()
    wanted = ("verbosity", "default_backend", "skip_special_tokens_in_output", "spaces_between_special_tokens_in_out",
              "enable_precache_with_tracing", "enable_parallel_encoding")  # fmt: skip
    return [ir.REGEX_INT, ir.REGEX_FLOAT, ir.REGEX_BOOL, ir.REGEX_STR, [getattr(settings, name) for name in wanted]]


@case
def templates(sgl: Any, backend: Any) -> Any:
    module = part(sgl, "chat_template")
    messages = [{"role": role, "content": f"{role} text"} for role in ("system", "user", "assistant", "user")]
    without = [{"role": "system", "content": None}, *messages[1:]]
    found = {
        t.name: [t.default_system_prompt, t.role_prefix_and_suffix, list(t.stop_str), t.image_token, t.audio_token,
                 t.style.name, t.get_prompt(messages), t.get_prompt(without)]
        for t in module.chat_template_registry.values()
    }  # fmt: skip
    return [found, {path: module.get_chat_template_by_model_path(path).name for path in PATHS},
            raised(lambda: module.get_chat_template("nothing"))]  # fmt: skip


@case
def executor_attributes(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, q: Any) -> None:
        s += sgl.system("S") + sgl.user(q) + sgl.assistant_begin() + sgl.gen("a", 1)
        s["own"] = [1]
        s.sync()
        forks = s.fork(2)
        s["children"] = [attributes(f.stream_executor) for f in forks]
        s["shared"] = all(f["own"] is s["own"] for f in forks)
        forks[0].stream_executor.messages_.append("more")
        s["asked"] = forks[0].get_meta_info("a")

    def attributes(ex: Any) -> Any:
        return [ex.text_, list(ex.messages_), sorted(map(str, ex.variables)), sorted(ex.meta_info),
                sorted(ex.variable_event), type(ex.sid).__name__, ex.images_, ex.cur_images, ex.fork_start_text_pos,
                ex.error_, ex.cur_role, ex.cur_role_begin_pos, ex.num_api_spec_tokens]  # fmt: skip

    s = p.run(q="why", backend=backend)
    s.sync()
    ex = s.stream_executor
    return [attributes(ex), s["children"], s["shared"], s["asked"], ex.arguments, ex.backend is backend]


@case
def group_iteration(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        forks = s.fork(3)
        collected: list[Any] = []
        collected.extend(forks)
        for f, text in zip(forks, "abc"):
            f += text
        s["texts"] = [f.text() for f in collected]
        s["kinds"] = [raised(lambda: len(forks)), raised(lambda: forks.__iadd__(["too", "few"])), type(forks).__name__]
        forks.join()

    s = p.run(backend=backend)
    return [s["texts"], s["kinds"]]


@case
def dtype_quirks(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "n " + sgl.gen("a", dtype=str, regex="[a-z]+")
        s += sgl.gen("c", dtype=bool, max_tokens=3) + sgl.gen("d", dtype="float", max_tokens=4)

    @sgl.function
    def wrong(s: Any, dtype: Any) -> None:
        s += "n " + sgl.gen("a", dtype=dtype)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        s = p.run(backend=backend)
        values = [s["a"], s["c"], s["d"]]
    said = [str(w.message) for w in heard if "dtype" in str(w.message)]
    return [values, said, [str(wrong.run(dtype=kind, backend=backend).error()) for kind in (list, "string")]]


@case
def choices_of_gen(sgl: Any, backend: Any) -> Any:
    plain, cold = sgl.gen("a", choices=["x"]), sgl.gen("a", max_tokens=5, choices=["x"], temperature=0.0)
    default = sgl.select("a", ["x"])
    return [type(plain).__name__, plain.temperature, cold.temperature, plain.choices_method is default.choices_method,
            default.choices_method is sgl.token_length_normalized, default.temperature, repr(sgl.gen("g", choices=[])),
            type(sgl.gen_int("i")).__name__, sgl.gen_int("i").sampling_params.dtype.__name__,
            sgl.gen_string("i").sampling_params.dtype.__name__]  # fmt: skip


@case
def nodes(sgl: Any, backend: Any) -> Any:
    ir = part(sgl, "ir")
    fork, item = ir.SglFork(2, [1, 2]), ir.SglGetForkItem(1)
    fork.prev_node = item.prev_node = ir.SglConstantText("x")
    texts = [repr(fork), repr(item), repr(ir.SglVariable("t", item)), repr(ir.SglArgument("q", 3)),
             repr(ir.SglVarScopeBegin("v")), repr(ir.SglVarScopeEnd("v")), repr(ir.SglCommitLazy()),
             repr(ir.SglConstantText("a'b"))]  # fmt: skip
    return [re.sub(r"%\d+", "%", text) for text in texts]


@case
def arguments(sgl: Any, backend: Any) -> Any:
    ir = part(sgl, "ir")
    one = ir.SglArgument("q", "value")
    none = ir.SglArgument("q", None)
    return [len(one), one[0], one[1:3], repr("a" + one), repr(one + "b"), raised(lambda: f"{one}"),
            raised(lambda: int(one)), raised(lambda: bool(one)), raised(lambda: len(none)),
            raised(lambda: range(one))]  # fmt: skip


@case
def graph(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, q: Any) -> None:
        s += "Start " + q + sgl.gen("a")
        s += sgl.select("b", ["x", "y"])
        forks = s.fork(2)
        forks += sgl.gen("f")
        s += "end" + s["a"] + sgl.gen("c")

    tracer = p.trace(backend=backend)
    given = p.trace(backend=backend, q="known")
    return [numbered(re.sub("choices_method=.*", "", t.last_node.print_graph_dfs())) for t in (tracer, given)]


@case
def calls_in_tracing(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def inner(s: Any, x: Any) -> None:
        s += "inner " + x

    @sgl.function
    def outer(s: Any, x: Any) -> None:
        s += "outer "
        t = inner(x=x)
        found.append(type(t).__name__)
        s += sgl.gen("a", 1)

    found: list[str] = []
    outer.trace(backend=backend)
    sgl.set_default_backend(backend)
    try:
        s = outer.run(x="given")
        return [found, s.text(), inner(x="y").text()]
    finally:
        sgl.set_default_backend(None)


@case
def called(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any, x: Any) -> Any:
        s += "x" + x + sgl.gen("a", 1)
        return 7

    s = p(x="given", backend=backend, temperature=0.5)
    t = p("by position", backend=backend)
    return [type(s).__name__, s["a"], s.ret_value, t.text()]


@case
def stream_pieces(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "abc" + sgl.gen("a") + " mid" + sgl.select("c", [" x", " yy"])

    @sgl.function(num_api_spec_tokens=8)
    def spec(s: Any) -> None:
        s += "abc" + sgl.gen("a")

    s = p.run(backend=backend, stream=True)
    chosen = list(s.text_iter("c"))
    whole = "".join(s.text_iter())
    broken = spec.run(backend=backend, stream=True)
    raised(lambda: list(broken.text_iter()))
    return [chosen, whole, s["a"], s["c"], type(broken.error()).__name__]


@case
def copied_role(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += sgl.user("u")
        with s.assistant():
            s += "A:"
            with s.copy() as c:
                c += "thought " + sgl.gen("t", 1)
            s += sgl.gen("a", 2)

    s = p.run(backend=backend)
    return [s["t"], s["a"], s.text(), s.messages()]


@case
def role_arguments(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        with s.system():
            s += "one"
        s.user("  two ")
        s.assistant(sgl.gen("a", 1, stop="q"))
        s += s.user(sgl.user("nested").expr_list[1])

    s = p.run(backend=backend, stop=["z"])
    return [s.text(), s.messages(), s["a"]]


@case
def precache_off(sgl: Any, backend: Any) -> Any:
    settings = part(sgl, "global_config").global_config

    @sgl.function
    def p(s: Any, q: Any) -> None:
        s += "A constant beginning that is clearly longer than sixty-four characters of text. " + q + sgl.gen("a", 1)

    settings.enable_precache_with_tracing = False
    try:
        states = p.run_batch([{"q": "one"}, {"q": "three"}], backend=backend, num_threads=1)
    finally:
        settings.enable_precache_with_tracing = True
    alone = p.run_batch([{"q": "alone"}], backend=backend, num_threads=1, progress_bar=True)
    return [[s["a"] for s in states], [s["a"] for s in alone]]


@case
def wire_of_an_endpoint(sgl: Any, backend: Any) -> Any:
    keyed = sgl.RuntimeEndpoint(backend.base_url, api_key="secret", chat_template_name="chatml")

    @sgl.function
    def p(s: Any) -> None:
        s += sgl.user("u") + sgl.assistant(sgl.gen("a", 1) + sgl.select("b", [" x", " y"]))

    s = after(p.run(backend=keyed))
    keyed.flush_cache()
    keyed.cache_prefix("a prefix")
    found = [s.text(), keyed.get_server_info(), keyed.get_model_name(), keyed.get_chat_template().name]
    keyed.start_profile()
    keyed.stop_profile()
    return found


@case
def settings_of_output(sgl: Any, backend: Any) -> Any:
    settings = part(sgl, "global_config").global_config

    @sgl.function
    def p(s: Any) -> None:
        s += "x" + sgl.gen("a", 1)

    settings.skip_special_tokens_in_output = settings.spaces_between_special_tokens_in_out = False
    try:
        return p.run(backend=backend)["a"]
    finally:
        settings.skip_special_tokens_in_output = settings.spaces_between_special_tokens_in_out = True


@case
def openai_completions(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += "n " + sgl.gen("a", 5, temperature=0.5, stop=["z"])
        s += sgl.gen("two", 3, n=2, frequency_penalty=0.5, presence_penalty=0.25, top_p=0.5)

    @sgl.function
    def choose(s: Any) -> None:
        s += "is" + sgl.select("c", ["yes", "no", "none"])

    @sgl.function(num_api_spec_tokens=32)
    def ahead(s: Any) -> None:
        s += "Name:" + sgl.gen("x", 8, stop=".") + "." + sgl.gen("y", 8, stop="!")

    @sgl.function
    def wrong(s: Any) -> None:
        s += "x" + sgl.gen("a", dtype=float)

    with answering(sgl, "gpt-3.5-turbo-instruct") as (model, taken):
        s, t, u = (after(program.run(backend=model)) for program in (p, choose, ahead))
        values = [s["a"], s["two"], s.text(), t["c"], t.get_meta_info("c"), u["x"], u["y"], u.text()]
        used = model.token_usage
        counted = used.completion_tokens > 0 < used.prompt_tokens
        used.reset()
        kinds = [type(wrong.run(backend=model).error()).__name__, model.is_chat_model, model.get_chat_template().name,
                 counted, used.prompt_tokens, used.completion_tokens]  # fmt: skip
        return [values, kinds, taken]


@case
def openai_chat(sgl: Any, backend: Any) -> Any:
    @sgl.function
    def p(s: Any) -> None:
        s += sgl.system("S") + sgl.user("u") + sgl.assistant(sgl.gen("a", 5, stop="z", temperature=0.5))

    @sgl.function
    def choose(s: Any) -> None:
        s += sgl.user("u") + sgl.assistant(sgl.select("c", ["yes", "no"]))

    @sgl.function
    def late(s: Any) -> None:
        s += sgl.user("u") + sgl.assistant("x" + sgl.gen("a"))

    @sgl.function(num_api_spec_tokens=32)
    def ahead(s: Any) -> None:
        s += sgl.user("u")
        s += sgl.assistant(" out" + sgl.gen("x", stop=".") + "." + sgl.gen("y", stop="!"))

    found = []
    for name in ("gpt-4o", "o1-mini", "o3-mini"):
        with answering(sgl, name) as (model, taken), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            s, t, u = (after(program.run(backend=model)) for program in (p, choose, late))
            sent = list(taken)
            v = after(ahead.run(backend=model))  # SGLang sends two bounds of the tokens then, of which OpenAI takes one
            values = [s["a"], s.messages(), raised(lambda t=t: t["c"]), str(u.error()), v["x"], v["y"], v.text()]
            found.append([values, model.is_chat_model, sent])
    return found
