"""A server that speaks the native /generate: bough's, or SGLang's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from bough.lang.backends.base import AsyncBackend, Generated
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod, Rows, decide, mean_logprob
from bough.lang.config import global_config
from bough.lang.errors import BackendError
from bough.lang.http import HttpClient
from bough.lang.model_template import model_template, without_lead
from bough.lang.params import LOGPROB_FIELDS, SglSamplingParams, apply_dtype
from bough.lang.scoring import rows_from, scored_prompts
from bough.lang.templates import get_chat_template, get_chat_template_by_model_path
from bough.lang.waiting import default_loop, runs_here

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor

PREFILL = {"max_new_tokens": 0}


class RuntimeEndpoint(AsyncBackend):
    """The server at ``base_url``.

    A server of SGLang gets the very requests that SGLang's own frontend sends. One of bough is told of programs, scores
    all choices of a select in one request, and renders its model's own chat template.

    Args:
        api_key: sent as a bearer token.
        verify: file of certificates to trust.
        chat_template_name: one of the named templates; by default the model's own, or the one that fits its name.

    Raises BackendError where the server does not answer.
    """

    takes_adapters = True

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        super().__init__()
        self.base_url = base_url
        self.api_key = api_key
        self.verify = verify
        self._http = HttpClient(base_url, api_key=api_key, verify=verify)
        self.model_info: dict[str, Any] = self.request("GET", "/get_model_info")
        self.knows_programs = bool(self.model_info.get("program_protocol"))
        self._ending: set[asyncio.Task[None]] = set()
        if chat_template_name:
            self.chat_template = get_chat_template(chat_template_name)
        else:
            own = self._wait(model_template(self._render)) if self.knows_programs else None
            self.chat_template = own or get_chat_template_by_model_path(self.model_info["model_path"])

    def shutdown(self) -> None:
        """Close the connections; not the server."""
        self._wait(self._http.close())

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer of any route of the server. Raises BackendError for every status but 200."""
        return self._wait(self._http.request(method, path, body))

    async def arequest(self, method: str, path: str, body: Any = None) -> Any:
        """As :meth:`request`, from any event loop."""
        work = self._http.request(method, path, body)
        if runs_here(default_loop()):
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, default_loop()))

    def get_model_name(self) -> str:
        return str(self.model_info["model_path"])

    def flush_cache(self) -> None:
        self.request("POST", "/flush_cache")

    def get_server_info(self) -> Any:
        return self.request("GET", "/server_info")

    def start_profile(self) -> None:
        self.request("GET", "/start_profile")

    def stop_profile(self) -> None:
        self.request("GET", "/stop_profile")

    def cache_prefix(self, prefix_str: str) -> None:
        self._wait(self._generate({"text": prefix_str, "sampling_params": PREFILL}))

    def fill_image(self, s: StreamExecutor) -> None:
        self.commit_lazy_operations(s)

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        if self.knows_programs and not isinstance(s, list) and s.program.calls:
            path = f"/v1/programs/{s.program.id}/" + ("cancel" if s.program.cancelled else "end")
            loop = default_loop()
            loop.call_soon_threadsafe(lambda: self._in_background(path))

    def _in_background(self, path: str) -> None:
        async def tell() -> None:
            try:
                await self._http.request("POST", path)
            except BackendError:
                pass  # the server forgets programs by itself

        task = asyncio.get_running_loop().create_task(tell())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def acommit_lazy_operations(self, s: StreamExecutor) -> None:
        await self._generate(_with_parts(s, {"text": s.text_, "sampling_params": PREFILL}))

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        answer = await self._generate(self._body(s, sampling_params))
        if isinstance(answer, list):  # n sequences
            return [one["text"] for one in answer], [one["meta_info"] for one in answer]
        return answer["text"], answer["meta_info"]

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        body = self._body(s, sampling_params, stream=True)
        seen = 0
        async with aclosing(self._http.events("/generate", body)) as events:
            async for event in events:
                if "text" not in event:
                    raise BackendError(event, int((event.get("error") or {}).get("code") or 500))
                text = event["text"][seen:]
                seen += len(text)
                yield text, event["meta_info"]

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        assert temperature <= 1e-5
        if self.knows_programs:
            return await self._select_at_once(s, choices, choices_method)
        prompt = await self._generate(_with_parts(s, {"text": s.text_, "sampling_params": PREFILL}))
        body = {
            "text": [s.text_ + choice for choice in choices],
            "sampling_params": {**PREFILL, "temperature": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": max(prompt["meta_info"]["prompt_tokens"] - 2, 0),
        }
        answers = [one["meta_info"] for one in await self._generate(_with_parts(s, body))]
        rows, normalized = [], []
        for answer in answers:
            healed, mean = _healed(answer["input_token_logprobs"], s.text_)
            rows.append(healed)
            normalized.append(mean)
        alone = None
        if choices_method.requires_unconditional_logprobs:
            ids = [[row[1] for row in r] for r in rows]
            body = {"input_ids": ids, "sampling_params": PREFILL, "return_logprob": True}
            found = await self._generate(_with_parts(s, body))
            alone = [one["meta_info"]["input_token_logprobs"] for one in found]
        output = [answer["output_token_logprobs"] for answer in answers]
        return decide(choices_method, choices, rows, output, alone, normalized)

    async def _select_at_once(
        self, s: StreamExecutor, choices: list[str], method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        ids = await self._http.request("POST", "/tokenize", {"prompt": [s.text_, *(s.text_ + c for c in choices)]})
        prompts, starts = scored_prompts(ids["tokens"][0], ids["tokens"][1:], method)
        body = {
            "input_ids": prompts, "sampling_params": {**PREFILL, "temperature": 0}, "return_logprob": True,
            "return_text_in_logprobs": True, "logprob_start_len": starts, "program": s.envelope(),
        }  # fmt: skip
        answers = [one["meta_info"] for one in await self._generate(_with_parts(s, body))]
        rows = [answer["input_token_logprobs"] for answer in answers]
        output = [answer["output_token_logprobs"] for answer in answers]
        return rows_from(method, choices, rows, output, answers)

    def _body(self, s: StreamExecutor, params: SglSamplingParams, *, stream: bool = False) -> dict[str, Any]:
        apply_dtype(params)
        body: dict[str, Any] = {
            "text": s.text_,
            "sampling_params": {
                "skip_special_tokens": global_config.skip_special_tokens_in_output,
                "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
                **params.to_srt_kwargs(),
            },
        }
        for name in LOGPROB_FIELDS:
            if (value := getattr(params, name)) is not None:
                body[name] = value
        if stream:
            body["stream"] = True
        if self.knows_programs:
            body["program"] = s.envelope()
        return _with_parts(s, body)

    async def _generate(self, body: dict[str, Any]) -> Any:
        return await self._http.request("POST", "/generate", body)

    async def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str | None:
        body = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            ids = (await self._http.request("POST", "/tokenize", body))["tokens"]
            letter = [
                (await self._http.request("POST", "/tokenize", {"prompt": "a", "add_special_tokens": add}))["tokens"]
                for add in (True, False)
            ]
            ids = without_lead(ids, letter[0], letter[1])
            text = await self._http.request("POST", "/detokenize", {"tokens": ids, "skip_special_tokens": False})
        except BackendError as error:
            if error.status in (400, 404):
                return None
            raise
        return str(text["text"])


def _with_parts(s: StreamExecutor, body: dict[str, Any]) -> dict[str, Any]:
    """``body`` with the image and the adapter of the call."""
    if s.lora_path is not None:
        body["lora_path"] = s.lora_path
    if s.images_:
        assert len(s.images_) == 1, "Only support one image."
        body["image_data"] = s.images_[0][1]
    return body


def _healed(rows: Rows, prompt: str) -> tuple[Rows, float]:
    """(rows, mean logprob) of a choice, without the token that the prompt ended with, unless the choice changed it."""
    mean = mean_logprob(rows)
    logprob, _, text = rows[0]
    if text is None or not prompt.endswith(text):
        return rows, mean
    if logprob is not None and len(rows) > 1:
        mean = (mean * len(rows) - logprob) / (len(rows) - 1)
    return rows[1:], mean
