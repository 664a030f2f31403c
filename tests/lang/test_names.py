"""Existing programs find every name that they import, and what no recording can show of how they run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import bough as sgl
from bough.lang import templates
from bough.lang.choices import ChoicesDecision
from bough.lang.waiting import Signal

from .openai_stub import answering
from .stub import serving

MODULES = {
    "sglang": """function gen gen_int gen_string select image video system user assistant system_begin system_end
        user_begin user_end assistant_begin assistant_end separate_reasoning set_default_backend flush_cache
        get_server_info Runtime RuntimeEndpoint Engine ServerArgs global_config token_length_normalized
        greedy_token_selection unconditional_likelihood_normalized OpenAI Anthropic LiteLLM VertexAI Crusoe
        __version__""",
    "sglang.lang.api": """function gen gen_int gen_string select image video system user assistant system_begin
        system_end user_begin user_end assistant_begin assistant_end separate_reasoning set_default_backend
        flush_cache get_server_info Runtime Engine""",
    "sglang.lang.ir": """REGEX_INT REGEX_FLOAT REGEX_BOOL REGEX_STR SglGen SglSelect SglExprList SglSeparateReasoning
        SglSamplingParams SglFunction""",
    "sglang.lang.interpreter": "StreamExecutor ProgramState ProgramStateGroup run_program",
    "sglang.lang.choices": """token_length_normalized greedy_token_selection unconditional_likelihood_normalized
        ChoicesDecision ChoicesSamplingMethod""",
    "sglang.lang.chat_template": """get_chat_template get_chat_template_by_model_path register_chat_template
        ChatTemplate""",
    "sglang.lang.tracer": "TracerProgramState trace_program extract_prefix_by_tracing StopTracing",
    "sglang.lang.backend.base_backend": "BaseBackend",
    "sglang.lang.backend.runtime_endpoint": "RuntimeEndpoint Runtime",
    "sglang.lang.backend.openai": "OpenAI",
    "sglang.global_config": "global_config",
    "sglang.lang.global_config": "global_config",
    "sglang.utils": """read_jsonl dump_state_text download_and_cache_file http_request print_highlight
        terminate_process wait_for_server launch_server_cmd""",
    "sglang.test.test_utils": """add_common_sglang_args_and_parse select_sglang_backend dump_bench_raw_result
        add_common_other_args_and_parse get_call_generate get_call_select CustomTestCase popen_launch_server
        DEFAULT_URL_FOR_TEST DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH""",
    "sglang.test.test_programs": "test_mt_bench test_decode_int test_stream test_regex",
    "sglang.srt.constrained.outlines_backend": "build_regex_from_object",
    "sglang.srt.utils.hf_transformers_utils": "get_tokenizer",
}
"""What the programs that are in use import."""

LOOK = """
import importlib.util, json, sys
import bough.compat.sglang
bough.compat.sglang.install()
wanted, missing = json.loads(sys.argv[1]), []
for module, names in wanted.items():
    found = importlib.import_module(module)
    assert importlib.util.find_spec(module) is found.__spec__
    starred = {}
    exec(f"from {module} import *", starred)
    missing += [f"{module}.{name}" for name in names.split() if not hasattr(found, name)]
    missing += [f"{module}: *: {name}" for name in names.split() if name[0] != "_" and name not in starred]
import sglang as sgl
assert importlib.reload(sgl) is sgl
from sglang import global_config
from sglang.lang.interpreter import ProgramState
assert global_config is sgl.lang.global_config.global_config
print(json.dumps(missing))
"""


def test_every_name_is_found() -> None:
    command = [sys.executable, "-c", LOOK, json.dumps(MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


class Held(sgl.FakeBackend):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(default="yes")
        self.go = Signal()

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        await self.go.reached()
        return await super().agenerate(s, sampling_params)


def test_a_run_is_over_before_the_model_is() -> None:
    """Appending does not wait, nor does asking whether a variable is there; the body runs in the caller's thread."""

    @sgl.function
    def p(s: Any) -> Any:
        s += "a" + sgl.gen("x") + sgl.gen("y")
        return threading.current_thread()

    backend = Held()
    state = p.run(backend=backend)
    assert state.ret_value is threading.current_thread()
    assert "x" not in state and state.stream_executor.text_ == "a"
    backend.go.set()
    assert state["y"] == "yes" and "x" in state and repr(state) == "ProgramState(ayesyes)"


def test_states_wait_for_themselves_only() -> None:
    @sgl.function
    def p(s: Any) -> None:
        forks = s.fork(2)
        forks[0] += sgl.gen("x")
        forks[1] += "text" + sgl.select("c", ["only"])
        s["other"] = forks[1].text()
        backend.go.set()
        forks.join()

    class Chooser(Held):
        async def aselect(self, s: Any, choices: Any, temperature: Any, method: Any) -> Any:
            return ChoicesDecision(choices[0], {})

    backend = Chooser()
    state = p.run(backend=backend)
    assert state["other"] == "textonly" and state["x"] == ["yes"] and state["c"] == ["only"]


def test_a_body_that_streams_runs_beside_the_caller() -> None:
    go = Signal()

    @sgl.function
    def p(s: Any) -> None:
        go.wait()
        s += "late" + sgl.gen("x")

    state = p.run(backend=sgl.FakeBackend(default="yes"), stream=True)
    assert state.stream_executor.text_ == ""
    go.set()
    assert "".join(state.text_iter()) == "lateyes"


def test_what_has_ended_can_be_followed() -> None:
    @sgl.function
    def p(s: Any) -> None:
        s += "a" + sgl.gen("x") + sgl.select("c", ["b"])

    with serving() as server:
        state = p.run(backend=sgl.RuntimeEndpoint(server.url), stream=True)
        list(state.text_iter())
        assert "".join(state.text_iter("x")) == state["x"] and "".join(state.text_iter()) == state.text()


def test_reasoning_stays_in_streams() -> None:
    @sgl.function
    def p(s: Any) -> None:
        s += sgl.user("u")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3"))

    state = p.run(backend=sgl.FakeBackend(default="<think>hm</think>yes"), stream=True)
    assert "".join(state.text_iter("x")) == state["x"] == "<think>hm</think>yes"
    assert state.error() is None and state.messages()[-1]["content"] == state["x"]


def test_templates_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "chat_template_registry", dict(templates.chat_template_registry))
    roles = {"system": ("S ", "\n"), "user": ("U ", "\n"), "assistant": ("A ", "\n")}
    templates.register_chat_template(templates.ChatTemplate("own", "be good", roles, stop_str=["END"]))

    @sgl.function
    def p(s: Any) -> None:
        s += sgl.user("u") + sgl.assistant(sgl.gen("x"))

    with serving() as server:
        state = p.run(backend=sgl.RuntimeEndpoint(server.url, chat_template_name="own"))
        assert state.text() == f"S be good\nU u\nA {state['x']}\n"
        assert server.taken()[1][3]["sampling_params"]["stop"] == ["END"]


def test_a_number_may_have_a_stop_of_its_own() -> None:
    @sgl.function
    def p(s: Any) -> None:
        s += "a" + sgl.gen("x", dtype=int, stop="!")

    with serving() as server:
        assert p.run(backend=sgl.RuntimeEndpoint(server.url))["x"] == "1"
        *_, (_, _, _, body) = server.taken()
        assert body["sampling_params"]["stop"] == ["!", " ", "\n"]


def test_each_thread_traces_for_itself() -> None:
    @sgl.function
    def inner(s: Any) -> None:
        s += "inner"

    @sgl.function
    def outer(s: Any, q: Any) -> None:
        made.append(inner())
        thread = threading.Thread(target=lambda: made.append(inner(backend=sgl.FakeBackend())))
        thread.start()
        thread.join()

    made: list[Any] = []
    outer.trace(backend=sgl.FakeBackend())
    assert [type(state).__name__ for state in made] == ["TracerProgramState", "ProgramState"]


def test_anthropic_is_sent_what_it_takes() -> None:
    """No sampling options at their defaults, and the system's message apart, which the state keeps."""
    anthropic, httpx = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    sent: list[dict[str, Any]] = []

    def answer(request: Any) -> Any:
        sent.append(json.loads(request.content))
        content = [{"type": "text", "text": "yes"}]
        usage = {"input_tokens": 3, "output_tokens": 1}
        return httpx.Response(200, json={
            "id": "x", "type": "message", "role": "assistant", "model": "m", "content": content,
            "stop_reason": "end_turn", "stop_sequence": None, "usage": usage,
        })  # fmt: skip

    @sgl.function
    def p(s: Any) -> None:
        s += sgl.system("S") + sgl.user("u") + sgl.assistant(sgl.gen("a", max_tokens=5))

    client = anthropic.DefaultAsyncHttpxClient(transport=httpx.MockTransport(answer))
    backend = sgl.Anthropic("m", api_key="none", http_client=client)
    state = p.run(backend=backend)
    assert state["a"] == "yes" and state.messages()[0] == {"role": "system", "content": "S"}
    p.run(backend=backend, top_k=7, temperature=0.5).sync()
    plain, asked = sent
    assert plain["system"] == "S" and plain["messages"] == [{"role": "user", "content": "u"}]
    assert "top_k" not in plain and (asked["top_k"], asked["temperature"]) == (7, 0.5)


def test_the_final_text_is_printed_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @sgl.function
    def p(s: Any) -> None:
        s += "a" + sgl.gen("x")

    for verbosity, printed in ((1, ""), (2, "ayes\n")):
        monkeypatch.setattr(sgl.global_config, "verbosity", verbosity)
        p.run(backend=sgl.FakeBackend(default="yes")).sync()
        assert capsys.readouterr().out == printed


def test_types_and_streams_of_openais_completions() -> None:
    """SGLang's own requests for these are refused by today's client."""

    @sgl.function
    def p(s: Any) -> None:
        s += "n " + sgl.gen("a") + sgl.gen("i", dtype=int) + sgl.gen("t", dtype=str)

    @sgl.function
    def q(s: Any) -> None:
        s += "n " + sgl.gen("a", stop="!")

    with answering(sgl, "gpt-3.5-turbo-instruct") as (model, taken):
        state = p.run(backend=model)
        assert (state["i"], state["t"]) == ("42", '" out put. More! z end"')
        assert "".join(q.run(backend=model, stream=True).text_iter("a")) == " out put. More"
        number, text = taken[1][1], taken[2][1]
        assert number["stop"] == [" "] and {chr(int(i)) for i in number["logit_bias"] if i != "256"} == set(
            "0123456789 "
        )
        assert text["stop"] == '"' and text["prompt"].endswith('42"') and taken[3][1]["stream"]
        assert model.token_usage.completion_tokens == 8
