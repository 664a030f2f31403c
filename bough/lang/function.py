"""What ``@function`` makes of a Python function: something that can be run, batched, streamed and traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bough.lang.config import global_config
from bough.lang.habits import Habits
from bough.lang.limits import Limits, Retry
from bough.lang.params import SglSamplingParams

if TYPE_CHECKING:
    from bough.lang.state import ProgramState
    from bough.lang.trace import TracerProgramState


class SglFunction:
    """A program. Its first parameter is the state ``s``; ``run`` gives the others.

    A sampling option of ``run`` that is also the name of a parameter of the program goes to both.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, Any] | None = None,
        *,
        limits: Limits | None = None,
        retry: Retry | None = None,
        priority: int = 0,
    ) -> None:
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = dict(bind_arguments or {})
        self.pin_prefix_rid = None
        self.limits = limits or Limits()
        self.retry = retry or Retry()
        self.priority = priority
        self.habits = Habits()
        spec = inspect.getfullargspec(func)
        assert spec.args and spec.args[0] == "s", 'The first argument must be "s"'
        self.arg_names = spec.args[1:]
        self.arg_defaults: Sequence[Any] = spec.defaults or []
        self.keyword_names = {*self.arg_names, *spec.kwonlyargs}

    def __repr__(self) -> str:
        return f"SglFunction({getattr(self.func, '__name__', self.func)})"

    def bind(self, **kwargs: Any) -> SglFunction:
        """The same program with some arguments given; they win over those of a call."""
        assert all(key in self.arg_names for key in kwargs)
        bound = SglFunction(
            self.func, bind_arguments={**self.bind_arguments, **kwargs},
            limits=self.limits, retry=self.retry, priority=self.priority,
        )  # fmt: skip
        bound.habits = self.habits
        return bound

    def options(
        self, *, limits: Limits | None = None, retry: Retry | None = None, priority: int | None = None
    ) -> SglFunction:
        """The same program with other limits, another way to repeat failed calls, or another priority."""
        other = SglFunction(
            self.func, self.num_api_spec_tokens, self.bind_arguments,
            limits=limits or self.limits, retry=retry or self.retry,
            priority=self.priority if priority is None else priority,
        )  # fmt: skip
        other.habits = self.habits
        return other

    def run(
        self,
        *args: Any,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        stop_regex: str | list[str] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program; back when its body ends, which may be before the model is done.

        Args:
            args, kwargs: of the program.
            stream: back at once; the body runs on a thread and texts can be followed as they grow.
            backend: an Engine, a RuntimeEndpoint or any other backend; by default the one that was set.
            use_thread: False lets every ``s +=`` wait until it is done, and raise what it fails with.

        The other arguments are sampling options of all gens that do not say otherwise.
        """
        from bough.lang.run import run_program

        values = dict(locals())
        arguments = self._arguments(args, kwargs, values)
        return run_program(
            self, backend or global_config.default_backend, args, arguments, _sampling(values), stream,
            use_thread=use_thread,
        )  # fmt: skip

    async def arun(self, *args: Any, **kwargs: Any) -> ProgramState:
        """As :meth:`run` for coroutines: back when everything is done, or, with ``stream=True``, at once.

        The body may be ``async def``; it runs on the caller's event loop then, otherwise on a thread.
        """
        from bough.lang.run import arun_program

        options = {name: kwargs.get(name, default) for name, default in RUN_DEFAULTS.items()}
        own = {name: value for name, value in kwargs.items() if name not in RUN_DEFAULTS}
        arguments = self._arguments(args, own, options)
        backend = options["backend"] or global_config.default_backend
        return await arun_program(self, backend, args, arguments, _sampling(options), options["stream"])

    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        n: int = 1,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        stop_regex: str | list[str] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        backend: Any = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once for each element of ``batch_kwargs``; the states in the same order.

        An element is a dict of arguments, or a list of them by position. An element that fails fails alone: reading
        its state raises.

        Args:
            num_threads: how many elements are in work at a time; ``auto`` lets a thousand.
            generator_style: an iterator that gives each state as soon as it and those before it are done.
        """
        from bough.lang.run import run_program_batch

        values = dict(locals())
        assert isinstance(batch_kwargs, list | tuple)
        if not batch_kwargs:
            return []
        return run_program_batch(
            self, backend or global_config.default_backend, [self._element(e) for e in batch_kwargs],
            _sampling(values), num_threads, progress_bar, generator_style,
        )  # fmt: skip

    def trace(self, *, backend: Any = None, **kwargs: Any) -> TracerProgramState:
        """Run the body without a model; arguments that are not given are symbols."""
        from bough.lang.trace import trace_program

        return trace_program(self, kwargs, backend or global_config.default_backend)

    def cache(self, backend: Any = None) -> None:
        """Have the constant beginning of the program computed, where it is longer than 64 characters."""
        from bough.lang.run import cache_program

        cache_program(self, backend or global_config.default_backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`run`, or, while another program is traced, :meth:`trace`."""
        from bough.lang.trace import current_tracer

        tracer = current_tracer()
        if tracer is None:
            return self.run(*args, **kwargs)
        kwargs["backend"] = tracer.backend
        return self.trace(*args, **kwargs)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Keyword arguments of the body: those of the call, options that it has parameters for, bound ones."""
        both = {}
        by_position = set(self.arg_names[: len(args)])
        with_default = set(self.arg_names[len(self.arg_names) - len(self.arg_defaults) :])
        for name, default in RUN_DEFAULTS.items():
            if name in self.keyword_names - by_position and not (name in with_default and options[name] == default):
                both[name] = options[name]
        return {**both, **kwargs, **self.bind_arguments}

    def _element(self, element: Any) -> dict[str, Any]:
        if isinstance(element, dict):
            return {**element, **self.bind_arguments}
        least = len(self.arg_names) - len(self.arg_defaults)
        if not isinstance(element, list | tuple) or not least <= len(element) <= len(self.arg_names):
            raise Exception("Given arguments mismatch the SGL function signature")
        return {**dict(zip(self.arg_names, element)), **self.bind_arguments}


RUN_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(SglFunction.run).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
"""Options of a run -> their defaults."""

_SAMPLING = [name for name in RUN_DEFAULTS if name not in ("stream", "backend", "use_thread")]


def _sampling(options: Mapping[str, Any]) -> SglSamplingParams:
    values = {name: options[name] for name in _SAMPLING}
    for name in ("stop", "stop_token_ids", "stop_regex"):
        values[name] = [] if values[name] is None else values[name]
    return SglSamplingParams(**values)
