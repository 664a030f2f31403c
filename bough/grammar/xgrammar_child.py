"""The program of the process that compiles for :mod:`bough.grammar.xgrammar`, and how the two talk.

It reads a :class:`Start` and then one constraint after the other from its standard input, and forks for each, so that
a compile that runs out of its share of time or memory ends alone.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from typing import IO, TYPE_CHECKING, Any

import msgspec

from bough.base.constraint import Constraint
from bough.grammar.admission import parse
from bough.grammar.structural import Tags, parse_tags

if TYPE_CHECKING:
    import xgrammar as library

COMPILE_SECONDS = 5
"""Of processor time for one compile; refused beyond that."""
WAIT_SECONDS = 30
"""Of any time. A machine that is this busy is no fault of the constraint's."""
COMPILE_BYTES = 1 << 30
"""Of memory beyond what the child has before."""
LARGEST_BYTES = 64 << 20
"""Of one compiled constraint, written down."""

SEPARATORS = {"fixed": (", ", ": "), "compact": (",", ":")}

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct):
    """What the child is told first.

    Attributes:
        tokens: of the tokenizer, as bytes, special ones empty.
        size: ids with a logit.
        eos_ids: ids that end a sequence.
        seconds: of processor time for one compile.
    """

    tokens: list[bytes]
    size: int
    eos_ids: list[int]
    seconds: int


class Result(msgspec.Struct):
    """A compiled constraint as the library writes it, or why there is none.

    Attributes:
        compiled: for the library's ``deserialize_json``.
        refused: what is wrong with the constraint.
        failed: what went wrong that is no fault of the constraint's.
    """

    compiled: str = ""
    refused: str = ""
    failed: str = ""


def tokenizer_info(start: Start) -> library.TokenizerInfo:
    import xgrammar as library

    return library.TokenizerInfo(
        start.tokens, library.VocabType.RAW, vocab_size=start.size, stop_token_ids=start.eos_ids
    )


def write_message(stream: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes:
    """One message. Raises EOFError where the stream has ended."""
    head = stream.read(_LENGTH.size)
    data = stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if not data:
        raise EOFError
    return data


def main() -> None:
    """Serve compiles until standard input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import xgrammar as library

    try:
        start = msgspec.msgpack.decode(read_message(source), type=Start)
        compiler = library.GrammarCompiler(tokenizer_info(start), max_threads=1, cache_enabled=False)
        while True:
            constraint = msgspec.msgpack.decode(read_message(source), type=Constraint)
            write_message(sink, _apart(compiler, constraint, start.seconds))
    except EOFError:
        return


def _apart(compiler: library.GrammarCompiler, constraint: Constraint, seconds: int) -> Result:
    """Compile ``constraint`` in a process that is forked for it."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(there)
        _bound(seconds)
        with os.fdopen(here, "wb") as stream:
            stream.write(msgspec.msgpack.encode(_compile(compiler, constraint)))
        os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as answers:
        data = answers.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGALRM:
            return Result(failed=f"the compile did not end within {WAIT_SECONDS} seconds")
        return Result(refused="the compile takes too much time or memory")
    return msgspec.msgpack.decode(data, type=Result)


def _bound(seconds: int) -> None:
    """Give this process its share of time and memory."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + COMPILE_BYTES, used + COMPILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(WAIT_SECONDS)
    os.nice(19)


def _compile(compiler: library.GrammarCompiler, constraint: Constraint) -> Result:
    try:
        text = _native(compiler, constraint).serialize_json()
    except MemoryError:
        return Result(refused="the compile takes too much memory")
    except Exception as error:  # the library raises RuntimeError for whatever it does not like
        return Result(refused=" ".join(str(error).split())[:500])
    if len(text) > LARGEST_BYTES:
        return Result(refused=f"compiled, it has {len(text)} bytes; at most {LARGEST_BYTES} are allowed")
    return Result(compiled=text)


def _native(compiler: library.GrammarCompiler, constraint: Constraint) -> library.CompiledGrammar:
    import xgrammar as library

    separators = SEPARATORS.get(constraint.whitespace)
    match constraint.kind:
        case "json_schema":
            return compiler.compile_json_schema(
                constraint.text, any_whitespace=False, separators=separators, strict_mode=False
            )
        case "regex":
            return compiler.compile_regex(constraint.text)
        case "choice":
            choices = " | ".join(_quoted(choice) for choice in parse(constraint))
            return compiler.compile_grammar(f"root ::= {choices}")
    tags = parse_tags(constraint)
    contents = [
        str(
            library.Grammar.from_json_schema(
                json.dumps(s.schema), any_whitespace=False, separators=separators, strict_mode=False
            )
        )
        for s in tags.structures
    ]
    return compiler.compile_structural_tag(_format(tags, contents))


def _format(tags: Tags, contents: list[str]) -> dict[str, Any]:
    """``tags`` as the library's structural tag, ``contents`` being the grammars of its structures."""
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": tags.triggers,
            "tags": [
                {"type": "tag", "begin": s.begin, "content": {"type": "grammar", "grammar": content}, "end": s.end}
                for s, content in zip(tags.structures, contents, strict=True)
            ],
            "at_least_one": tags.at_least_one,
            "stop_after_first": tags.stop_after_first,
        },
    }


def _quoted(text: str) -> str:
    """A literal in the library's EBNF."""
    return '"' + "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


if __name__ == "__main__":
    main()
