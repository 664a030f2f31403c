"""What the language asks of whatever generates text."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bough.lang import template_table as template_table  # registers the named templates
from bough.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from bough.lang.errors import Unsupported
from bough.lang.params import SglSamplingParams
from bough.lang.templates import ChatTemplate, get_chat_template
from bough.lang.waiting import default_loop, in_background, wait_for

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor

T = TypeVar("T")

Generated = tuple[str | list[str], Any]
THREADS = 128


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "bough-backend")


async def in_thread(work: Callable[[], T]) -> T:
    """``work()`` on a thread, in the context of the caller."""

    def run() -> T:
        try:
            return context.run(work)
        except StopIteration as error:  # no future takes one, and whoever awaits it would wait for ever
            raise RuntimeError("StopIteration was raised") from error

    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads(), run)


async def several(n: int, once: Callable[[], Coroutine[Any, Any, tuple[str, Any]]]) -> Generated:
    """``n`` answers of an API that gives one for a request."""
    if n == 1:
        return await once()
    requests = [asyncio.ensure_future(once()) for _ in range(n)]
    try:
        answers = await asyncio.gather(*requests)
    finally:
        for request in requests:
            request.cancel()
    return [text for text, _ in answers], [meta for _, meta in answers]


class BaseBackend:
    """A backend whose methods block; subclass it to write one. Each call runs on a thread.

    Nothing has to be overridden: what a backend does not do fails when a program asks for it, with
    :class:`bough.lang.errors.Unsupported`.

    Backends of this package derive from :class:`AsyncBackend` instead, and block nobody.

    Attributes:
        support_concate_and_append: joins texts as KV.
        is_chat_model: takes messages only.
        knows_programs: takes envelopes, so that forks and selects need no preparing requests.
        keeps_budgets: lets the calls of a program generate no more than its budget together.
        keeps_texts: is nevertheless given the text that the branches of a fork begin with, before they do.
        keeps_leases: asks for a lease with the text that it has computed.
        takes_adapters: obeys ``lora_path`` of a call.
        loop: the event loop that its coroutines must run on; None: any.
    """

    support_concate_and_append = False
    is_chat_model = False
    knows_programs = False
    keeps_budgets = False
    keeps_texts = False
    keeps_leases = False
    takes_adapters = False
    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self.chat_template: ChatTemplate = get_chat_template("default")

    def get_model_name(self) -> str:
        """Name of the model; empty where it has none."""
        return ""

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template

    def cache_prefix(self, prefix_str: str) -> None:
        """Have a text computed that programs will begin with."""

    def uncache_prefix(self, rid: str) -> None: ...

    def end_request(self, rid: str | list[str]) -> None: ...

    def begin_program(self, s: StreamExecutor) -> None: ...

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        """The program of a state is over. Must not block."""

    def wants_text(self, s: StreamExecutor) -> bool:
        """Whether :meth:`commit_lazy_operations` has anything to do for a fork of ``s``."""
        return True

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Have the text of a state computed, because others will go on from it."""

    def fork_program(
        self, src: StreamExecutor, dst: list[StreamExecutor], position_ids_offset: list[int] | None = None
    ) -> None: ...

    def fill_image(self, s: StreamExecutor) -> None: ...

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        """(text, or a list of ``n`` texts; meta information)."""
        raise Unsupported(f"{type(self).__name__} does not generate")

    def generate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Iterator[tuple[str, Any]]:
        """(new text, meta information) until the generation is over."""
        raise Unsupported(f"{type(self).__name__} does not stream")

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        raise Unsupported(f"{type(self).__name__} does not select")

    def concatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        raise Unsupported(f"{type(self).__name__} does not join caches")

    def shutdown(self) -> None: ...

    def flush_cache(self) -> Any: ...

    def get_server_info(self) -> Any: ...

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        return await in_thread(lambda: self.generate(s, sampling_params))

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        pieces = await in_thread(lambda: iter(self.generate_stream(s, sampling_params)))
        while (piece := await in_thread(lambda: next(pieces, None))) is not None:
            yield piece

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        return await in_thread(lambda: self.select(s, choices, temperature, choices_method))

    async def acommit_lazy_operations(self, s: StreamExecutor) -> dict[str, Any] | None:
        """As :meth:`commit_lazy_operations`; meta information, where there is any."""
        await in_thread(lambda: self.commit_lazy_operations(s))
        return None

    async def aconcatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        await in_thread(lambda: self.concatenate_and_append(src_rids, dst_rid))


class AsyncBackend(BaseBackend, ABC):
    """A backend of coroutines. The blocking methods wait for them."""

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return wait_for(work, self.loop or default_loop())

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        return self._wait(self.agenerate(s, sampling_params))

    def generate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Iterator[tuple[str, Any]]:
        pieces = aiter(self.agenerate_stream(s, sampling_params))

        async def following() -> tuple[str, Any] | None:
            return await anext(pieces, None)

        while (piece := self._wait(following())) is not None:
            yield piece

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        from bough.lang.choices import token_length_normalized

        return self._wait(self.aselect(s, choices, temperature, choices_method or token_length_normalized))

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        self._wait(self.acommit_lazy_operations(s))

    def tell_end(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        """An ``end_program`` for those that are told: :meth:`aend_program` in the background, if there were calls."""
        if not isinstance(s, list) and s.program.calls:
            how: Literal["cancel", "end"] = "cancel" if s.program.cancelled else "end"
            in_background(functools.partial(self.aend_program, s.program.id, how), self.loop or default_loop())

    async def aend_program(self, program: str, how: Literal["cancel", "end"]) -> None:
        """Say that ``program`` is over. That nobody is there to hear it is no error."""

    @abstractmethod
    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated: ...

    async def aselect(
        self, s: StreamExecutor, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        raise Unsupported(f"{type(self).__name__} does not select")

    async def acommit_lazy_operations(self, s: StreamExecutor) -> dict[str, Any] | None:
        return None

    async def aconcatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        raise Unsupported(f"{type(self).__name__} does not join caches")
