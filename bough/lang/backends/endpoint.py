"""A server that speaks the native /generate: bough's, or SGLang's."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Literal

from bough.lang.backends.aborting import aborting
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
LEAST = 256
"""Characters that are sent again sooner than they are named."""
COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens")


class RuntimeEndpoint(AsyncBackend):
    """The server at ``base_url``.

    A server of SGLang gets the very requests that SGLang's own frontend sends. One of bough is told of programs, scores
    all choices of a select in one request, renders its model's own chat template, and keeps the texts of a program:
    what a state begins with is sent once, however many calls and branches go on from it.

    Args:
        api_key: sent as a bearer token.
        verify: file of certificates to trust.
        chat_template_name: one of the named templates; by default the model's own, or the one that fits its name.

    Raises BackendError where the server does not answer.
    """

    keeps_texts = True
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
        self.knows_programs = self.keeps_budgets = self.keeps_leases = bool(self.model_info.get("program_protocol"))
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
        if self.knows_programs:
            self.tell_end(s)

    async def aend_program(self, program: str, how: Literal["cancel", "end"]) -> None:
        # The server forgets programs by itself; at the end of the process the session is closed.
        with suppress(BackendError, RuntimeError):
            await self._http.request("POST", f"/v1/programs/{program}/{how}")

    def wants_text(self, s: StreamExecutor) -> bool:
        return not self.knows_programs or (self.keeps_texts and len(s.text_) - _kept(s) >= LEAST)

    async def acommit_lazy_operations(self, s: StreamExecutor) -> dict[str, Any]:
        body: dict[str, Any] = {"text": s.text_, "sampling_params": PREFILL}
        if self.knows_programs:
            body["program"] = s.envelope(more=s.lease is None)
            if s.lease is not None:
                body["lease"] = s.lease[0]
        answer = await self._after(s, "/generate", _with_parts(s, body))
        meta: dict[str, Any] = answer["meta_info"]
        _keep(s, answer["text"], meta)
        return meta

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        body = self._body(s, sampling_params)
        answer = await (self._aborting if self.knows_programs else self._after)(s, "/generate", body)
        if isinstance(answer, list):  # n sequences
            _keep(s, answer[0]["text"], answer[0]["meta_info"])
            return [one["text"] for one in answer], [one["meta_info"] for one in answer]
        _keep(s, answer["text"], answer["meta_info"])
        return answer["text"], answer["meta_info"]

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        body, before, seen, complete = self._body(s, sampling_params, stream=True), s.text_, 0, False
        while True:
            try:
                async with aclosing(self._http.events("/generate", _shortened(s, body))) as events:
                    async for event in events:
                        if "text" not in event:
                            raise BackendError(event, int((event.get("error") or {}).get("code") or 500))
                        text = event["text"][seen:]
                        seen += len(text)
                        complete = event["meta_info"].get("finish_reason") is not None
                        _keep(s, event["text"], event["meta_info"], before)
                        yield text, event["meta_info"]
                return
            except BackendError as error:
                if complete:  # what broke off is the end of the stream behind it
                    return
                if not _forgotten(s, error):
                    raise

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
        if self.wants_text(s):
            meta = await self.acommit_lazy_operations(s)
            if s.current is not None:
                s.current.count(meta)
        texts = [s.text_ + choice for choice in choices]
        ids = (await self._after(s, "/tokenize", {"prompt": [s.text_, *texts]}))["tokens"]
        prompts, starts = scored_prompts(ids[0], ids[1:], method)
        n = len(choices)
        body = {
            "sampling_params": {**PREFILL, "temperature": 0}, "return_logprob": True, "return_text_in_logprobs": True,
            "program": s.envelope(),
        }  # fmt: skip
        work = [self._after(s, "/generate", _with_parts(s, body | {"text": texts, "logprob_start_len": starts[:n]}))]
        if prompts[n:]:
            alone = {"input_ids": prompts[n:], "logprob_start_len": starts[n:]}
            work.append(self._generate(_with_parts(s, body | alone)))
        answers = [one["meta_info"] for found in await asyncio.gather(*work) for one in found]
        rows = [answer["input_token_logprobs"] for answer in answers]
        output = [answer["output_token_logprobs"] for answer in answers]
        return rows_from(method, choices, rows, output, answers)

    async def _after(self, s: StreamExecutor, path: str, body: dict[str, Any]) -> Any:
        """The answer to ``body``, sent without what the server keeps of its texts, or whole where it no longer does."""
        try:
            return await self._http.request("POST", path, _shortened(s, body))
        except BackendError as error:
            if not _forgotten(s, error):
                raise
            return await self._http.request("POST", path, body)

    async def _aborting(self, s: StreamExecutor, path: str, body: dict[str, Any]) -> Any:
        """As :meth:`_after`. When cancelled, aborts the request by its name and counts what it had generated."""

        async def abort() -> bool:
            return bool((await self._http.request("POST", "/abort_request", {"rid": body["rid"]}))["aborted"])

        def told(work: asyncio.Task[Any]) -> None:
            found = work.result()
            metas = [one["meta_info"] for one in (found if isinstance(found, list) else [found])]
            if s.current is not None:
                s.current.follow({name: sum(meta[name] for meta in metas) for name in COUNTED})

        body["rid"] = uuid.uuid4().hex
        return await aborting(self._after(s, path, body), abort, told)

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


def _kept(s: StreamExecutor) -> int:
    """How many characters of the text of ``s`` the server keeps."""
    if s.sent is None:
        return 0
    known = s.sent[1]
    return len(known) if s.text_.startswith(known) else len(os.path.commonprefix([known, s.text_]))


def _shortened(s: StreamExecutor, body: dict[str, Any]) -> dict[str, Any]:
    """``body``, whose texts begin with that of ``s``, as it is sent: a call is named in the place of what is kept."""
    n = _kept(s)
    if s.sent is None or n < LEAST:
        return body
    key = "text" if "text" in body else "prompt"
    whole = body[key]
    rest = whole[n:] if isinstance(whole, str) else [text[n:] for text in whole]
    return {**body, key: rest, "prefix": {"program": s.program.id, **s.sent[0], "chars": n}}


def _keep(s: StreamExecutor, answer: str, meta: dict[str, Any], before: str | None = None) -> None:
    """Remember what the server says it keeps of the text of ``s`` (or ``before``) and ``answer``."""
    told = meta.get("program") or {}
    if (n := told.get("text")) and s.current is not None:
        s.sent = {"node": s.current.node, "id": told["text_id"]}, ((s.text_ if before is None else before) + answer)[:n]


def _forgotten(s: StreamExecutor, error: BackendError) -> bool:
    """The server does not keep the text of ``s`` any more: it has to be sent."""
    said = error.args[0]
    if s.sent is None or not isinstance(said, dict) or said.get("code") != "unknown_text":
        return False
    s.sent = None
    return True


def _healed(rows: Rows, prompt: str) -> tuple[Rows, float]:
    """(rows, mean logprob) of a choice, without the token that the prompt ended with, unless the choice changed it."""
    mean = mean_logprob(rows)
    logprob, _, text = rows[0]
    if text is None or not prompt.endswith(text):
        return rows, mean
    if logprob is not None and len(rows) > 1:
        mean = (mean * len(rows) - logprob) / (len(rows) - 1)
    return rows[1:], mean
