"""The text of a sequence does not depend on how its tokens were cut into outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.base.errors import DeadlineExceeded, EngineError, InvalidRequest, Overloaded, Unavailable
from bough.base.messages import Finish, Output
from bough.base.params import SamplingParams
from bough.engine.generation import GenerateOptions
from bough.engine.text import SequenceText, error_of, load_text
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.stop import StopMatcher
from bough.text.tokenizer import Tokenizer

from .vocabulary import write_vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found, template = load_text(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))
    assert template is not None
    return found


def test_a_model_without_template_has_none(tmp_path: Path) -> None:
    assert load_text(write_vocabulary(tmp_path, template=None))[1] is None


texts = st.text(st.sampled_from("ab é🙂\n"), max_size=30)


@given(
    text=texts,
    stop=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(0, 90)),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    dropped=st.integers(0, 3),
)
def test_any_cut_gives_the_same_text(
    tokenizer: Tokenizer, text: str, stop: list[str], cuts: set[int], include: bool, min_tokens: int, dropped: int
) -> None:
    ids = tokenizer.encode(text, add_special=False)
    ids = ids[: max(0, len(ids) - dropped)]  # may end inside a character
    matcher = StopMatcher(stop, (), min_tokens, IncrementalDetokenizer(tokenizer))
    finish, whole = Finish("length"), tokenizer.decode(ids)
    for i, token in enumerate(ids):
        if (match := matcher.push(token)) is not None:
            finish, ids = Finish("stop", match.pattern), ids[: i + 1]
            whole = tokenizer.decode(ids)[: match.end if include else match.start]
            break
    options = GenerateOptions(params=SamplingParams(stop=tuple(stop), min_tokens=min_tokens), include_stop=include)
    sequence = SequenceText(0, tokenizer, tokenizer.encode("x", add_special=False), options)
    bounds = [0, *sorted(c for c in cuts if 0 < c < len(ids)), len(ids)]
    shown = ""
    for start, end in zip(bounds, bounds[1:]):
        last = finish if end == len(ids) else None
        chunk = sequence.take(Output("r", start, ids[start:end], 1, 0, last))
        assert chunk.n_generated == end
        shown += chunk.text
    assert shown == whole


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("matched", [None, 66])
def test_a_stop_id_is_shown_only_on_demand(tokenizer: Tokenizer, include: bool, matched: int | None) -> None:
    options = GenerateOptions(params=SamplingParams(), include_stop=include)
    ids = tokenizer.encode("abc", add_special=False)
    chunk = SequenceText(0, tokenizer, ids, options).take(Output("r", 0, ids, 1, 0, Finish("stop", matched)))
    assert chunk.text == ("abc" if include else "ab")


def test_a_bad_ending_keeps_the_text_that_was_held_back(tokenizer: Tokenizer) -> None:
    options = GenerateOptions(params=SamplingParams(stop=("bcd",)))
    sequence = SequenceText(0, tokenizer, [], options)
    ids = tokenizer.encode("abc", add_special=False)
    assert sequence.take(Output("r", 0, ids, 1, 0)).text == "a"
    assert sequence.take(Output("r", 3, [], 1, 0, Finish("error", status=500))).text == "bc"


@pytest.mark.parametrize(("finish", "kind"), [
    (Finish("timeout", status=408), DeadlineExceeded),
    (Finish("abort"), EngineError),
    (Finish("error", status=500), EngineError),
    (Finish("error", status=400), InvalidRequest),
    (Finish("error", status=429), Overloaded),
    (Finish("error", status=503), Unavailable),
])  # fmt: skip
def test_endings_have_their_exceptions(finish: Finish, kind: type[Exception]) -> None:
    assert type(error_of(finish)) is kind
