"""Clients that cannot share an environment with us: their tests run, and none is skipped, in one of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from .apart import environment
from .serving import ROOT, Server

SCORER = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, folder = sys.argv[1:]
model = LocalCompletionsAPI(
    model="tiny", base_url=url + "/v1/completions", tokenizer=folder, tokenizer_backend="huggingface",
    num_concurrent=4, max_retries=1, batch_size=2, max_length=1024,
)
pairs = json.load(sys.stdin)
asked = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
texts = [Instance("loglikelihood_rolling", {}, (a + b,), i) for i, (a, b) in enumerate(pairs)]
print(json.dumps({"pairs": model.loglikelihood(asked), "texts": model.loglikelihood_rolling(texts)}))
"""
PAIRS = [("the cat", " sat on the mat"), ("the cat", " ran."), ("a dog and", " a cat"), ("the", " the the the")]


@pytest.mark.slow
@pytest.mark.parametrize("requirement", ["litellm==1.109.1", "instructor==1.17.0"])
def test_their_tests_run_apart(tmp_path: Path, requirement: str) -> None:
    name = requirement.partition("=")[0]
    python = environment(tmp_path / "env", requirement)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/e2e/test_client_{name}.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


@pytest.mark.slow
def test_lm_eval_scores_as_transformers_does(served: Server, long_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    python = environment(tmp_path / "env", "lm-eval[api]==0.4.13")
    done = subprocess.run(
        [python, "-c", SCORER, served.url, str(long_model)], input=json.dumps(PAIRS), capture_output=True, text=True,
        cwd=tmp_path, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    tokenizer = AutoTokenizer.from_pretrained(long_model)
    model = AutoModelForCausalLM.from_pretrained(long_model, dtype=torch.float32)
    for (context, more), (scored, greedy), text in zip(PAIRS, told["pairs"], told["texts"], strict=True):
        ids = tokenizer(context + more, return_tensors="pt").input_ids
        n = ids.shape[1] - len(tokenizer(context).input_ids)
        with torch.inference_mode():
            logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1]
        each = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(scored, each[-n:].sum(), rtol=0.02)
        assert greedy == bool((logprobs[-n:].argmax(-1) == ids[0, -n:]).all())
        assert text <= each.sum() + 0.5
