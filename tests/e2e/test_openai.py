"""The official client against the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest

from .serving import Server, wait_for

GREEDY = {"ignore_eos": True}


@pytest.fixture
def client(served: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completion_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="tiny", prompt="the cat sat on", max_tokens=40, temperature=0, extra_body=GREEDY
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 40
    pieces = list(client.completions.create(
        model="tiny", prompt="the cat sat on", max_tokens=40, temperature=0, extra_body=GREEDY, stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    last = pieces[-1]
    assert last.choices == [] and last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 40)


def test_text_is_streamed_while_it_is_generated(client: openai.OpenAI) -> None:
    """So long a text that it cannot be finished before its first piece is read, however busy the machine is."""
    with client.completions.create(
        model="tiny", prompt="the cat sat on", max_tokens=30000, temperature=0, extra_body=GREEDY, stream=True
    ) as stream:
        first = next(piece.choices[0] for piece in stream if piece.choices[0].text)
    assert first.finish_reason is None


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "the dog"}, {"role": "user", "content": "the cat"}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=30, temperature=0, extra_body=GREEDY
    )
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    with client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=30, temperature=0, extra_body=GREEDY, stream=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        pieces = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == choice.message.content
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage is not None and pieces[-1].usage.completion_tokens == 30


def test_a_conversation_finds_its_beginning_in_the_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "the mat and the log and the conversation"}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "again"},
    ]  # fmt: skip
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, temperature=0)
    assert first.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    # All of the first prompt comes back, but for what follows its last user message in the template.
    assert details.cached_tokens >= first.usage.prompt_tokens - 5
    assert details.cached_tokens < second.usage.prompt_tokens


def test_several_choices(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="the dog", n=3, max_tokens=20, temperature=1.0, seed=7, extra_body=GREEDY
        )
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert answer.usage is not None and answer.usage.completion_tokens == 60
        return [c.text for c in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_streams_of_several_choices(client: openai.OpenAI) -> None:
    arguments = {"model": "tiny", "prompt": "the dog", "n": 3, "max_tokens": 20, "seed": 7, "extra_body": GREEDY}
    whole = client.completions.create(**arguments)
    texts = ["", "", ""]
    for piece in client.completions.create(**arguments, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in whole.choices]


def test_seeds(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=20, seed=seed, temperature=1.0,
            extra_body=GREEDY,
        )  # fmt: skip
        return answer.choices[0].message.content or ""

    assert text(1) == text(1) != text(2)


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "the cat"}], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=4, extra_body=GREEDY,
    )  # fmt: skip
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 5
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 4
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0  # greedy takes the likeliest
    plain = client.completions.create(
        model="tiny", prompt="the cat", max_tokens=5, temperature=0, logprobs=2, extra_body=GREEDY
    )
    found = plain.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and len(found.token_logprobs) == 5


def test_stop_strings(client: openai.OpenAI) -> None:
    arguments = {"model": "tiny", "prompt": "the mat", "temperature": 0, "extra_body": GREEDY}
    text = client.completions.create(**arguments, max_tokens=60).choices[0].text
    stop = next(text[i : i + 3] for i in range(10, len(text)) if "�" not in text[i : i + 3])
    assert len(stop) == 3
    stopped = client.completions.create(**arguments, max_tokens=60, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    pieces = client.completions.create(**arguments, max_tokens=60, stop=[stop], stream=True)
    assert "".join(p.choices[0].text for p in pieces) == stopped.text


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt="a")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[5] * 32768, max_tokens=10)
    assert long.value.code == "context_length_exceeded", long.value.body
    with pytest.raises(openai.BadRequestError) as hot:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as pattern:  # which only the engine compiles
        client.completions.create(model="tiny", prompt="a", extra_body={"stop_regex": "(("})
    assert pattern.value.param == "stop_regex"


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_asynchronous_client(served: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

            async def ask(i: int, stream: bool) -> str:
                messages = [{"role": "user", "content": "the cat" * (1 + i)}]
                arguments = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
                if not stream:
                    answer = await client.chat.completions.create(**arguments, extra_body=GREEDY)
                    return answer.choices[0].message.content or ""
                text = ""
                async for piece in await client.chat.completions.create(**arguments, extra_body=GREEDY, stream=True):
                    text += piece.choices[0].delta.content or ""
                return text

            alone = [await ask(i, False) for i in range(4)]
            together = await asyncio.gather(*(ask(i % 4, i % 3 == 0) for i in range(24)))
            assert together == alone * 6
            completion = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4)
            assert len(completion.choices) == 2

    asyncio.run(main())


def test_a_response_is_kept_and_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="tiny", input="the cat", max_output_tokens=20, temperature=0, extra_body=GREEDY
    )
    assert first.status == "incomplete" and first.usage is not None and first.usage.output_tokens == 20
    with client.responses.stream(
        model="tiny", input="the cat", max_output_tokens=20, temperature=0, extra_body=GREEDY
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == first.output_text == client.responses.retrieve(first.id).output_text
    second = client.responses.create(
        model="tiny", input="again", previous_response_id=first.id, max_output_tokens=5, temperature=0
    )
    assert second.usage is not None
    # The first turn comes from the cache, but for the end of its prompt and what was cut off behind its text.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 5


def test_a_batch(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="the mat", max_tokens=8, temperature=0, extra_body=GREEDY)
    body = {"model": "tiny", "prompt": "the mat", "max_tokens": 8, "temperature": 0, **GREEDY}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = client.files.create(file=json.dumps(line).encode(), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    answer = json.loads(client.files.content(output).text)["response"]["body"]
    assert answer["choices"][0]["text"] == whole.choices[0].text
