"""A server process that a script starts for itself."""

from __future__ import annotations

import atexit
import json
import re
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import aclosing
from threading import Timer
from typing import Any

from bough.base.cli import arguments_of
from bough.base.sglang_flags import translated
from bough.lang.backends.endpoint import RuntimeEndpoint
from bough.lang.http import HttpClient

_ANNOUNCED = re.compile(r" at (http://\S+)/v1")


class ServerArgs:
    """SGLang's arguments of a server, as they were given; ``Runtime(**vars(args))`` takes them."""

    def __init__(self, model_path: str, **kwargs: Any) -> None:
        self.model_path = model_path
        self.__dict__.update(kwargs)


class Runtime:
    """``bough serve`` with a model, and its endpoint; shut down with the script.

    Args:
        log_level: ``error`` keeps the server's messages to itself.
        launch_timeout: seconds until the server must be ready.
        args, kwargs: SGLang's server arguments, ``model_path`` first, or flags of ``bough serve`` as keywords; what
            means nothing here is warned of.

    Raises RuntimeError where the server does not start.
    """

    def __init__(self, log_level: str = "error", launch_timeout: float = 300.0, *args: Any, **kwargs: Any) -> None:
        model = args[0] if args else kwargs.pop("model_path", None)
        self.server_args = {"model_path": model, "log_level": log_level, **kwargs}
        kwargs.setdefault("port", 0)
        command = [sys.executable, "-m", "bough.cli.main", "serve", *([str(model)] if model else [])]
        for name, value in kwargs.items():
            try:
                options = translated({"path": model, name: value})
                del options["path"]
                command += arguments_of(options)
            except TypeError as error:
                if value:
                    warnings.warn(f"{error}; it is left out", stacklevel=2)
        errors = subprocess.DEVNULL if log_level == "error" else None
        self._process: subprocess.Popen[str] | None = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        self.pid: int | None = self._process.pid
        atexit.register(self._end)
        self.url = self._address(self._process, launch_timeout)
        self.generate_url = self.url + "/generate"
        self.endpoint = RuntimeEndpoint(self.url, api_key=kwargs.get("api_key"))

    def _address(self, process: subprocess.Popen[str], seconds: float) -> str:
        assert process.stdout is not None
        timer = Timer(seconds, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if found := _ANNOUNCED.search(line):
                    return found.group(1)
        finally:
            timer.cancel()
        self._end()
        raise RuntimeError("Initialization failed. Run `bough serve` with the same model to see why.")

    def shutdown(self) -> None:
        """Close the connections and end the server. Idempotent."""
        if self._process is not None:
            self.endpoint.shutdown()
        self._end()

    def _end(self) -> None:
        process, self._process, self.pid = self._process, None, None
        if process is not None:
            atexit.unregister(self._end)
            end_process(process)
            if process.stdout is not None:
                process.stdout.close()

    def start_profile(self) -> None:
        self.endpoint.start_profile()

    def stop_profile(self) -> None:
        self.endpoint.stop_profile()

    def cache_prefix(self, prefix: str) -> None:
        self.endpoint.cache_prefix(prefix)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer of ``transformers``, which must be installed."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.endpoint.get_model_name())

    async def async_generate(
        self, prompt: Any, sampling_params: dict[str, Any] | None = None, session_id: str | None = None
    ) -> AsyncIterator[str]:
        """The new text of one prompt, as it comes."""
        http = HttpClient(self.url, api_key=self.endpoint.api_key)
        seen = 0
        body = {"text": prompt, "sampling_params": sampling_params or {}, "stream": True}
        try:
            async with aclosing(http.events("/generate", body)) as events:
                async for event in events:
                    text = event["text"][seen:]
                    seen += len(text)
                    if text:
                        yield text
        finally:
            await http.close()

    add_request = async_generate

    def generate(
        self,
        prompt: Any,
        sampling_params: dict[str, Any] | None = None,
        return_logprob: bool | list[bool] | None = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        lora_path: Any = None,
        session_id: str | None = None,
    ) -> str:
        """The answer of /generate as JSON text."""
        fields = {
            "return_logprob": return_logprob, "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num, "lora_path": lora_path, "session_id": session_id,
        }  # fmt: skip
        body = {"text": prompt, "sampling_params": sampling_params or {}}
        body |= {name: value for name, value in fields.items() if value is not None}
        return json.dumps(self.endpoint.request("POST", "/generate", body))

    def encode(self, prompt: Any) -> str:
        """The answer of /encode as JSON text."""
        return json.dumps(self.endpoint.request("POST", "/encode", {"text": prompt}))

    async def get_server_info(self) -> Any:
        return await self.endpoint.arequest("GET", "/server_info")


def end_process(process: subprocess.Popen[str]) -> None:
    """Ask a server to end, and see that it does."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
