"""The API process as the supervisor starts it, against an engine of this process over the real transport."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from bough.base.config import Config, ModelConfig
from bough.base.limits import Limits
from bough.base.messages import (
    PROTOCOL,
    Control,
    ControlReply,
    Finish,
    FromEngine,
    Hello,
    ModelInfo,
    Output,
    Outputs,
    Request,
    Stats,
    ToEngine,
)
from bough.engine.driver import Driver
from bough.engine.ipc import SocketPort
from bough.engine.launch import Launch

from .scripted import PATIENCE, make_config, make_tokenizer, wait_for


class Echo:
    """A scheduler whose sequences repeat their prompt's last token, one each 5 ms; the last one when they may end."""

    def __init__(self) -> None:
        self.outbox: list[FromEngine] = []
        self.running: dict[str, tuple[Request, int]] = {}
        self.steps = 0
        self.may_end = threading.Event()

    @property
    def idle(self) -> bool:
        return not self.running

    @property
    def stalled(self) -> bool:
        return False

    def patience(self) -> float:
        return 0.0

    def receive(self, message: ToEngine) -> None:
        if isinstance(message, Request):
            self.running[message.rid] = (message, 0)
        elif isinstance(message, Control):
            self.outbox.append(ControlReply(message.id, True))
        else:
            for rid in message.rids:
                if rid in self.running:
                    request, n = self.running.pop(rid)
                    self.outbox.append(Outputs([Output(rid, n, [], len(request.prompt), 0, Finish("abort"))]))

    def step(self) -> None:
        time.sleep(0.005)
        self.steps += 1
        for rid, (request, n) in list(self.running.items()):
            last = n + 1 == request.params.max_tokens
            if last and not self.may_end.is_set():
                continue
            token = int(request.prompt[-1])
            finish = Finish("length") if last else None
            self.outbox.append(Outputs([Output(rid, n, [token], len(request.prompt), 0, finish)]))
            self.running[rid] = (request, n + 1)
            if last:
                del self.running[rid]

    def stats(self) -> Stats:
        counts = {field.name: 0 for field in msgspec.structs.fields(Stats) if field.type is int}
        lists: dict[str, list[float]] = {"step_seconds": [], "device_seconds": [], "step_tokens": []}
        return msgspec.convert({"type": "stats", **counts, "steps": self.steps, **lists}, Stats)

    def check(self) -> None: ...


class Core:
    def __init__(self, folder: Path) -> None:
        tokenizer = make_tokenizer()
        model = ModelInfo(
            name="echo", path=str(folder), architecture="echo", vocab_size=tokenizer.vocab_size, context_length=4096,
            eos_ids=tokenizer.eos_ids, dtype="float32", n_parameters=0,
        )  # fmt: skip
        self.hello = Hello(PROTOCOL, os.getpid(), model, 1024, 1, Limits(), kernels="echoes")
        self.scheduler = Echo()

    def keep_up(self) -> None:
        pass

    def prepare(self) -> bool:
        return False

    def close(self) -> None: ...


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, for the socket's sake."""
    with tempfile.TemporaryDirectory(prefix="bough-") as folder:
        yield Path(folder)


class Api:
    """One API process."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.report, end = os.pipe()
        launch = Launch(
            config=config, run_dir=str(run_dir), supervisor=os.getpid(), report_fd=end, listen_fd=self.listener.fileno()
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bough.server.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=(end, self.listener.fileno()), text=False,
        )  # fmt: skip
        os.close(end)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.msgpack.encode(launch))
        self.process.stdin.close()

    def answers(self, path: str, status: int) -> bool:
        try:
            return httpx.get(self.url + path, timeout=PATIENCE).status_code == status
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self.report)
        self.listener.close()


@pytest.fixture
def api(run_dir: Path, tmp_path: Path) -> Iterator[Api]:
    make_tokenizer()._full.save(str(tmp_path / "tokenizer.json"))
    made = Api(replace(make_config(grace=PATIENCE), model=ModelConfig(path=str(tmp_path))), run_dir)
    yield made
    made.close()


def test_before_the_engine_is_there(api: Api) -> None:
    wait_for(lambda: api.answers("/health", 200))
    unready = httpx.get(api.url + "/readyz")
    assert unready.status_code == 503 and "loading" in unready.json()["problems"][0]
    answer = httpx.post(api.url + "/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503 and "retry-after" in answer.headers
    api.process.send_signal(signal.SIGTERM)
    assert api.process.wait(PATIENCE) == 0


def test_serve_and_drain(api: Api, run_dir: Path, tmp_path: Path) -> None:
    core = Core(tmp_path)
    driver = Driver(core, SocketPort(run_dir))
    engine = threading.Thread(target=driver.run)
    engine.start()
    try:
        wait_for(lambda: api.answers("/readyz", 200))
        assert os.read(api.report, 100) == b"ready"
        body = {"prompt": "abc", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", api.url + "/v1/completions", json=body, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            assert '"text":"c"' in first
            api.process.send_signal(signal.SIGTERM)
            wait_for(lambda: api.answers("/readyz", 503))
            refused = httpx.post(api.url + "/v1/completions", json={"prompt": "a"}, timeout=PATIENCE)
            assert refused.status_code == 503 and refused.headers["connection"] == "close"
            core.scheduler.may_end.set()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        chunks = [json.loads(line.removeprefix("data: ")) for line in (first, *rest[:-1])]
        # However the tokens were grouped into chunks.
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 100
        assert api.process.wait(PATIENCE) == 0
        assert api.process.stdout is not None
        shown = api.process.stdout.read().decode()
        assert f"curl {api.url}/v1/chat/completions" in shown and "; kernels: echoes\n" in shown
    finally:
        driver.stop()
        engine.join(PATIENCE)


def test_no_torch_in_the_api_process() -> None:
    code = "import sys, bough.server.process; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has such policies")
@pytest.mark.parametrize(("policy", "kept"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
def test_it_steps_back_unless_somebody_has_chosen_a_policy(policy: str, kept: str) -> None:
    code = (
        "import os; from bough.server.process import step_back; "
        f"os.sched_setscheduler(0, os.{policy}, os.sched_param(0)); step_back(); "
        f"assert os.sched_getscheduler(0) == os.{kept}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
