"""Chat messages to the text of a prompt, by the model's own Jinja template."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes

from bough.base.errors import ConfigError, InvalidRequest
from bough.text.hf_vocab import read_json
from bough.text.marking import MarkedText, Marker, Marks
from bough.text.sandbox import OUTPUT_CHARS, RangeBudget, Sandbox
from bough.text.tokenizer import Tokenizer

Json = Any

ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_RESERVED = frozenset((
    "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "range",
    "raise_exception", "strftime_now",
))  # fmt: skip
_COMMON_OPTIONS = frozenset(
    ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "verbosity", "documents")
)
# Words of the API itself, which templates look up and compare; they are never marked.
_API_WORDS = ROLES | frozenset((
    "content", "text", "type", "role", "name", "tool_calls", "tool_call_id", "id", "arguments", "description",
    "parameters", "properties", "required", "object", "string", "reasoning_content",
))  # fmt: skip
_MAX_DEPTH = 64


def sources_from_folder(folder: str | Path) -> dict[str, str]:
    """The templates of a Hugging Face folder by name; the main one is called "default".

    Raises ConfigError for files that cannot be read.
    """
    folder = Path(folder)
    found: dict[str, str] = {}
    for file in ("chat_template.json", "tokenizer_config.json"):
        found.update(_named(read_json(folder / file).get("chat_template"), folder / file))
    if (main := folder / "chat_template.jinja").is_file():
        found["default"] = _read(main)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read(path)
    return found


def sources_from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates in the metadata of a GGUF file by name; the main one is called "default"."""
    prefix = "tokenizer.chat_template."
    found = {key.removeprefix(prefix): str(value) for key, value in metadata.items() if key.startswith(prefix)}
    if (main := metadata.get("tokenizer.chat_template")) is not None:
        found["default"] = str(main)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error


def _named(value: Json, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (KeyError, TypeError):
        raise ConfigError(f"{path}: chat_template must be text, or a list of objects with name and template") from None


class ChatTemplate:
    """Renders conversations; safe to use from many threads.

    Args:
        sources: templates by name; empty when the model has none. "tool_use" is taken when tools are given.
        tokenizer: of the model; its special tokens are kept apart from those that clients write.
        now: clock of templates that print the date.

    Raises ConfigError when a template is not valid Jinja.
    """

    def __init__(
        self, sources: Mapping[str, str], tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._tokenizer = tokenizer
        environment = Sandbox(now)
        self._templates: dict[str, _Compiled] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = _Compiled(environment, source, tokenizer.special_tokens)
            except (jinja2.TemplateError, SyntaxError) as error:  # Python's own, where loops are nested too deeply
                raise ConfigError(f"the chat template {name!r} is broken: {error}") from error
            except (RecursionError, MemoryError):
                raise ConfigError(f"the chat template {name!r} is nested too deeply") from None

    @property
    def exists(self) -> bool:
        return "default" in self._templates

    @property
    def source(self) -> str:
        """All templates as they are written, for those who recognise a model by them."""
        return "\n".join(compiled.source for compiled in self._templates.values())

    @property
    def reads_tools(self) -> bool:
        """Whether tools that are given are shown to the model."""
        return any(compiled.reads_tools for compiled in self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Mapping[str, Json]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Json] | None = None,
    ) -> MarkedText:
        """The prompt of a conversation, to be encoded with :meth:`Tokenizer.encode_chat`.

        Args:
            messages: as in the OpenAI API, decoded from JSON; only text content.
            tools: function tools, offered to the template as they are.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: leave the last message open, for the model to go on with it.
            options: further variables of the template; only names that it reads, or common ones.

        Raises InvalidRequest when the model has no template, when the template refuses the conversation,
        or when it exceeds its budget.
        """
        compiled = self._templates.get("tool_use") if tools else None
        compiled = compiled or self._templates.get("default")
        if compiled is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot take messages; send a prompt to the completions "
                "endpoint instead",
                param="messages", code="no_chat_template",
            )  # fmt: skip
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        compiled.check_options(options or {})
        prepared = [_prepare(message, compiled) for message in messages]
        if not prepared:
            raise InvalidRequest("messages is empty", param="messages")
        client = {**(options or {}), "messages": prepared, "tools": list(tools) if tools else None}
        marks = compiled.marker.marks_for(_strings(client, 0))
        context: dict[str, Json] = _mark(client, marks)
        if continue_final_message:
            _open_end(context["messages"][-1], marks)
        context["add_generation_prompt"] = add_generation_prompt
        context["bos_token"], context["eos_token"] = self._tokenizer.bos_token, self._tokenizer.eos_token
        text = compiled.render(context)
        return marks.wrap(_cut(text, marks) if continue_final_message else text)


class _Compiled:
    """One template and what its source says about the messages that it expects."""

    def __init__(self, environment: Sandbox, source: str, special_tokens: Sequence[str]) -> None:
        tree = environment.parse(source)
        self.source = source
        self._template = environment.from_string(source)
        self._options = frozenset(meta.find_undeclared_variables(tree)) | _COMMON_OPTIONS
        self.reads_tools = "tools" in self._options
        self.marker = Marker(special_tokens, [str(node.value) for node in tree.find_all(nodes.Const)] + _data(tree))
        self.takes_parts = _loops_over_content(tree)
        self.takes_strings = not self.takes_parts or any(test.name == "string" for test in tree.find_all(nodes.Test))

    @functools.cached_property
    def takes_argument_text(self) -> bool:
        """Whether the arguments of past calls must be JSON text, because the template writes them as they are.

        Most templates encode an object; those that were written for text fail on one, or print it as Python does.
        """
        contents = (_content("", self), None)
        for text in (self._call(content, {"probe": 1}) for content in contents):
            if text and "probe" in text:
                return "{'probe'" in text and "'arguments'" not in text  # a template may print the whole message
        return any("probe" in (self._call(content, '{"probe": 1}') or "") for content in contents)

    @functools.cached_property
    def nulls(self) -> tuple[Json, ...]:
        """Contents beside calls, of null and an empty text, that this template gets as null; else it gets a text.

        Some templates write calls only beside null. Others fail on it, or print it.
        """
        arguments = '{"probe": 1}' if self.takes_argument_text else {"probe": 1}
        null, empty = self._call(None, arguments), self._call(_content("", self), arguments) or ""
        if null is None or null.count("None") > empty.count("None"):
            return ()
        return (None, "") if "probe" in null and "probe" not in empty else (None,)

    def _call(self, content: Json, arguments: Json) -> str | None:
        """What the template makes of a call with these arguments, beside ``content``; None where it refuses it."""
        call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
        talk = [
            {"role": "user", "content": _content("x", self)},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        context = {"messages": talk, "tools": None, "add_generation_prompt": False, "bos_token": "", "eos_token": ""}
        try:
            return self.render(context)
        except InvalidRequest:
            return None

    def check_options(self, options: Mapping[str, Json]) -> None:
        """Raises InvalidRequest for options that are the engine's own or that the template does not read."""
        for name in options:
            if name in _RESERVED or name not in self._options:
                known = ", ".join(sorted(self._options - _RESERVED))
                raise InvalidRequest(
                    f"chat_template_kwargs has {name!r}; this model's template takes {known}",
                    param="chat_template_kwargs",
                )

    def render(self, context: dict[str, Json]) -> str:
        """Run the template; raises InvalidRequest with its own message when it fails."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context, range=RangeBudget()):
                size += len(piece)
                if size > OUTPUT_CHARS:
                    raise InvalidRequest(f"the prompt has more than {OUTPUT_CHARS} characters", param="messages")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except RecursionError:
            raise InvalidRequest("the chat template recurses too deeply", param="messages") from None
        except Exception as error:  # a template can raise anything that an expression on client data can
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        return "".join(pieces)


def _data(tree: nodes.Template) -> list[str]:
    """The text that the template writes outside of expressions."""
    return [node.data for node in tree.find_all(nodes.TemplateData)]


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template iterates over the content of messages, so that it takes lists of parts."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter) and node.node is not None:
            return is_content(node.node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _prepare(message: Mapping[str, Json], compiled: _Compiled) -> dict[str, Json]:
    """A message in the form that templates expect: text content, tool arguments as objects."""
    if message.get("role") not in ROLES:
        raise InvalidRequest(f"a message has the role {message.get('role')!r}", param="messages")
    prepared = dict(message)
    prepared["content"] = _content(message.get("content"), compiled)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise InvalidRequest("tool_calls must be a list", param="messages")
        prepared["tool_calls"] = [_tool_call(call, as_text=compiled.takes_argument_text) for call in calls]
        if message.get("content") in compiled.nulls:
            prepared["content"] = None
    return prepared


def _content(content: Json, compiled: _Compiled) -> Json:
    if content is None:
        return ""
    if isinstance(content, str):
        return content if compiled.takes_strings else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest("the content of a message must be a string or a list of parts", param="messages")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest("this model takes only text content", param="messages")
        texts.append(part["text"])
    return [{"type": "text", "text": text} for text in texts] if compiled.takes_parts else "\n".join(texts)


def _tool_call(call: Json, *, as_text: bool) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest("a tool call needs a function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise InvalidRequest("the arguments of a tool call are not valid JSON", param="messages") from None
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _strings(value: Json, depth: int) -> list[str]:
    """Every string inside ``value``; raises InvalidRequest when it is nested too deeply."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest("the messages are nested too deeply", param="messages")
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item, depth + 1)]
    return []


def _mark(value: Json, marks: Marks) -> Json:
    """A copy of ``value`` with marks in its strings."""
    if isinstance(value, str):
        return value if value in _API_WORDS else marks.mark(value)
    if isinstance(value, Mapping):
        return {_mark(key, marks): _mark(item, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(item, marks) for item in value]
    return value


def _open_end(message: dict[str, Json], marks: Marks) -> None:
    """Put the cut mark behind the last message's text, with a space that shows whether the template trims."""
    end = marks.cut + " "
    if message["content"] is None or isinstance(message["content"], str):
        message["content"] = (message["content"] or "") + end
    else:
        message["content"][-1]["text"] += end


def _cut(text: str, marks: Marks) -> str:
    at = text.rfind(marks.cut)
    if at < 0:
        raise InvalidRequest("this model's chat template cannot continue a message", param="continue_final_message")
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()
