"""OpenVINO GenAI's continuous batching pipeline under the workloads of ``bough bench``, in its own process.

It has no server of its own, so it is driven in process: no HTTP and no second process take time from it, an
advantage over every server beside it. Runs in the peer's environment, as ``python -m
benchmarks.peers.openvino_pipeline MODEL``; a line of JSON on standard input names a workload, its sizes and a
seed, the answering line holds its calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

import msgspec
import openvino_genai as genai

from benchmarks.peers.work import WORK
from bough.bench.client import Client
from bough.bench.measures import Call


class Pipeline(Client):
    """Takes a workload's requests as a server's client would; :meth:`drive` computes them."""

    def __init__(self, model: str, cache_gib: int, threads: int) -> None:
        super().__init__("", "", "")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 256
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._running: dict[int, tuple[Call, Any, asyncio.Future[None]]] = {}
        self._next = 0

    async def complete(self, prompt: str, tokens: int, **fields: Any) -> Call:
        """Add a request and wait for its end."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=False).input_ids
        n = int(fields.get("n", 1))
        call = Call(asked=tokens * n, start=time.perf_counter(), n_prompt=ids.shape[1])
        handle = self._pipeline.add_request(self._next, ids, generation_config(tokens, n, fields))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[self._next] = (call, handle, done)
        self._next += 1
        await done
        call.end = time.perf_counter()
        return call

    async def chat(self, messages: list[dict[str, str]], tokens: int, **fields: Any) -> Call:
        """The same for a conversation."""
        return await self.complete(self._tokenizer.apply_chat_template(messages, True), tokens, **fields)

    async def drive(self, work: asyncio.Task[list[Call]]) -> list[Call]:
        """Step the pipeline until the workload is done."""
        while not work.done():
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                self._collect()
            await asyncio.sleep(0)
        return work.result()

    def _collect(self) -> None:
        now = time.perf_counter()
        for key, (call, handle, done) in list(self._running.items()):
            while handle.can_read():
                for index, (_, output) in enumerate(sorted(handle.read().items())):
                    self._take(call, index, output, now)
            if "RUNNING" not in str(handle.get_status()):
                del self._running[key]
                done.set_result(None)

    def _take(self, call: Call, index: int, output: Any, now: float) -> None:
        ids = output.generated_ids
        call.n_generated += len(ids)
        call.texts[index] = call.texts.get(index, "") + self._tokenizer.decode(ids)
        call.stamps.setdefault(index, []).append(now)


def generation_config(tokens: int, n: int, fields: dict[str, Any]) -> Any:
    """The pipeline's settings for the fields of an OpenAI request."""
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = fields.get("ignore_eos", True)
    config.apply_chat_template = False
    if not config.ignore_eos:
        config.eos_token_id = 2
    if fields.get("temperature", 0.0) > 0:
        config.do_sample = True
        config.temperature = fields["temperature"]
        config.rng_seed = fields.get("seed", 0)
        config.num_return_sequences = n
    if "response_format" in fields:
        schema = fields["response_format"]["json_schema"]["schema"]
        config.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(schema))
    return config


async def answer(pipeline: Pipeline, order: dict[str, Any]) -> list[Call]:
    """Run one workload."""
    workload = WORK[order["workload"]]
    work = asyncio.ensure_future(workload.run(pipeline, order["sizes"], random.Random(order["seed"])))
    return await pipeline.drive(work)


def main() -> None:
    """Say that the model is loaded, then serve orders until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--cache-gib", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    pipeline = Pipeline(arguments.model, arguments.cache_gib, arguments.threads)
    print("{}", flush=True)
    for line in sys.stdin:
        calls = asyncio.run(answer(pipeline, json.loads(line)))
        print(msgspec.json.encode(calls).decode(), flush=True)


if __name__ == "__main__":
    main()
