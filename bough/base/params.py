"""What a client may ask of the sampler."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling options of one sequence, as they travel to the engine.

    Text-level options (``n``, ``echo``, trimming of stop strings) stay with the API side and are not
    here. Ranges are checked by :func:`bough.base.validate.validate_request`.

    Attributes:
        max_tokens: generate at most this many tokens; None means up to the context length.
        min_tokens: end-of-sequence and stop tokens are masked, and stop strings ignored, before this many.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p (Holtzman et al. 2019).
        min_p: keep tokens with at least min_p times the likeliest one's probability (Nguyen et al. 2024).
        seed: the draw at a position is a function of (seed, position) only; None lets the engine choose.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens.
        repetition_penalty: CTRL's (Keskar et al. 2019), over prompt and generated tokens; 1 is off.
        logit_bias: token id -> value added to its logit.
        stop: strings that end the sequence as soon as the generated text contains one.
        stop_regex: patterns (RE2 syntax) that end it as soon as the generated text contains a match.
        stop_token_ids: ids that end the sequence, besides the model's own end-of-sequence ids.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        allowed_token_ids: only these may be sampled; empty means all.
        bad_words: token sequences that may not be generated.
        logprobs: number of alternatives reported with each generated token; 0 reports the chosen one
            alone, None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt.
        logprob_start: first prompt position whose logprob is reported.
        logprob_token_ids: ids whose logprobs are reported at every reported position.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()


Pooling = Literal["last", "mean", "first", "classify"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is made of a prompt in place of text: one float32 vector.

    Attributes:
        kind: ``last`` is the last hidden state of the last token, ``first`` of the first token,
            ``mean`` the mean of all tokens', [D] each; ``classify`` the scores of the classification head at the
            last token (an encoder's first), [labels], as they are.
    """

    kind: Pooling = "last"
