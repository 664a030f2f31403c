"""What a chat request says about tools: which the model is shown, which it may or must call, and how."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.limits import DEFAULT_LIMITS, Limits
from bough.base.numbers import leave_out_inexact
from bough.grammar.admission import check_parts
from bough.server.errors import encode_json
from bough.server.schema import ChatRequest, TokenizeRequest
from bough.text.formats import AnswerFormat
from bough.text.reasoning.families import ReasoningFormat
from bough.text.tokenizer import Tokenizer
from bough.text.tools.constraint import LENIENT, CallGrammar

_NAME = re.compile(r"[\w./-]{1,128}")
_CALL_RULE = re.compile(r"rule (?:call|part|value)_(\d+)(?:_\d+)?: (?:failed to compile JSON schema: )?(.*)")
"""What a message about the grammar of calls says, and of which tool."""
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_NAMED = ("properties", "$defs", "definitions")
_SEVERAL = ("anyOf", "oneOf", "allOf", "required", "enum")
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        shown: for the chat template; None for none.
        schemas: of the arguments of those that may be called, by name.
        mode: whether the model must not, may or must call one.
        strict: the names of those whose arguments keep to all of their schemas wherever they are called. What the
            arguments of others must look like is enforced beside them, as far as it can be.
        parallel: an answer may have several calls.
        legacy: the request speaks of functions, so the answer does.
        key: digest of all that this was read from, where it is remembered.
    """

    shown: list[dict[str, Any]] | None = None
    schemas: Mapping[str, Mapping[str, Any]] | None = None
    mode: Literal["none", "auto", "required"] = "none"
    strict: frozenset[str] = frozenset()
    parallel: bool = True
    legacy: bool = False
    limits: Limits = DEFAULT_LIMITS
    key: bytes = b""

    def constraint(
        self, form: AnswerFormat, tokenizer: Tokenizer, thinking: ReasoningFormat | None, asked: Constraint | None
    ) -> Constraint | None:
        """What the answer must look like, so that its calls are as was asked; ``thinking`` may come first.

        ``asked`` is what the request wants of an answer without calls.
        """
        either = asked is not None and asked.kind in ("json_schema", "json_object")
        if not self.schemas or not (self.mode == "required" or self.strict or either):
            return asked
        if form.tools is None:
            if self.mode == "required":
                raise InvalidRequest("this server was started with --tool-parser none", param="tool_choice")
            return asked
        special = {token: tokenizer.token_id(token) for token in tokenizer.special_tokens}
        grammar = CallGrammar(
            form.tools, {token: i for token, i in special.items() if i is not None}, self.limits.constraint_bytes
        )
        for schema in self.schemas.values():
            check_parts("tools", schema, self.limits)
        schemas = {name: self._enforced(name, schema) for name, schema in self.schemas.items()}
        if self.mode == "required":
            return grammar.constraint(schemas, parallel=self.parallel, thinking=thinking)
        if either:
            return grammar.constraint(schemas, parallel=self.parallel, thinking=thinking, otherwise=asked)
        return asked or grammar.tags(schemas, parallel=self.parallel, thinking=thinking)

    def _enforced(self, name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {word: value for word, value in schema.items() if word not in LENIENT}
        if name in self.strict:
            return own
        enforced = copy.deepcopy(own)
        leave_out_inexact(enforced)
        return enforced | LENIENT

    @contextmanager
    def own_names(self, otherwise: str | None) -> Iterator[None]:
        """Has what the engine refuses of :meth:`constraint` name the tool, where that can be told.

        ``otherwise`` is the field that says what an answer without calls must be.
        """
        try:
            yield
        except InvalidRequest as error:
            if error.param not in ("grammar", "structural_tag") or not self.schemas or not self.shown:
                raise
            names = list(self.schemas)
            rule = _CALL_RULE.search(error.message)
            if rule is None and (otherwise or len(names) > 1):
                raise InvalidRequest(
                    error.message, param=otherwise or ("functions" if self.legacy else "tools")
                ) from None
            name = names[0 if rule is None else int(rule[1])]
            i = next(i for i, tool in enumerate(self.shown) if tool["function"]["name"] == name)
            at = f"functions[{i}].parameters" if self.legacy else f"tools[{i}].function.parameters"
            reason = error.message if rule is None else rule[2]
            raise InvalidRequest(f"the parameters of the tool {name!r}: {reason}", param=at) from None


def tool_use(body: ChatRequest | TokenizeRequest, limits: Limits) -> ToolUse:
    """The tools of ``body``. Raises InvalidRequest that names the field."""
    tools, legacy = body.tools, False
    choice: Any = None
    if isinstance(body, ChatRequest):
        choice = body.tool_choice
        if body.functions is not None or body.function_call is not None:
            if body.tools is not None or choice is not None:
                raise InvalidRequest("functions and tools exclude each other", param="functions")
            legacy = True
            tools = [{"type": "function", "function": function} for function in body.functions or ()]
            choice = body.function_call
            if isinstance(choice, dict):
                choice = {"type": "function", "function": choice}
    schemas = schemas_of(tools or [], limits)
    mode, names = _choice(choice, schemas, "function_call" if legacy else "tool_choice")
    if not schemas or mode == "none":
        return ToolUse()
    callable_ = schemas if names is None else {name: schemas[name] for name in names}
    parallel = not legacy and not (isinstance(body, ChatRequest) and body.parallel_tool_calls is False)
    # A single named function is called once.
    parallel = parallel and not (isinstance(choice, dict) and choice.get("type") == "function")
    strict = frozenset(tool["function"]["name"] for tool in tools or () if tool["function"].get("strict"))
    return ToolUse(tools, callable_, mode, strict & callable_.keys(), parallel, legacy, limits)


def schemas_of(tools: list[dict[str, Any]], limits: Limits) -> dict[str, Mapping[str, Any]]:
    """The schemas of the arguments of ``tools``, by name. Raises InvalidRequest for what is not a function."""
    if len(tools) > limits.tools:
        raise InvalidRequest(f"at most {limits.tools} tools are allowed", param="tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(name, str):
            raise InvalidRequest(f"{at} must be a function with a name", param=at)
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{at}.function.name must have 1 to 128 letters, digits or _ - . /", param=f"{at}.function.name"
            )
        if name in schemas:
            raise InvalidRequest(f"two tools are called {name!r}", param=f"{at}.function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequest(
                f"{at}.function.parameters must be a JSON Schema of an object", param=f"{at}.function.parameters"
            )
        kinds = (parameters or {}).get("type") or "object"
        if kinds != "object" and (not isinstance(kinds, list) or "object" not in kinds):
            raise InvalidRequest(
                f"{at}.function.parameters is no JSON Schema of an object: its type is {kinds!r}"[:512],
                param=f"{at}.function.parameters",
            )
        if wrong := _wrong_schema(parameters):
            raise InvalidRequest(
                f"{at}.function.parameters is no JSON Schema: {wrong}"[:512], param=f"{at}.function.parameters"
            )
        if len(encode_json(tool)) > limits.tool_schema_bytes:
            raise InvalidRequest(f"{at} is longer than {limits.tool_schema_bytes} bytes", param=at)
        schemas[name] = parameters or _NO_ARGUMENTS
    return schemas


def _wrong_schema(schema: Any) -> str | None:
    """What keeps ``schema`` from being a JSON Schema of arguments; None for nothing that can be seen at a glance."""
    waiting = [] if schema is None else [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            return "a schema must be an object"
        node = {word: value for word, value in node.items() if value is not None}  # as some clients leave things out
        kinds = node.get("type", [])
        if any(kind not in _TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
            return f"there is no type {kinds!r}"
        for word in _NAMED:
            if not isinstance(node.get(word, {}), dict):
                return f"{word} must be an object"
            waiting += node.get(word, {}).values()
        for word in _SEVERAL:
            if not isinstance(node.get(word, []), list):
                return f"{word} must be a list"
            waiting += node.get(word, []) if word not in ("required", "enum") else ()
        items = node.get("items", [])
        waiting += items if isinstance(items, list) else [items]
    return None


def _choice(
    choice: Any, schemas: Mapping[str, Any], param: str
) -> tuple[Literal["none", "auto", "required"], list[str] | None]:
    """(mode, names of the tools that may be called; None for all) of a ``tool_choice``."""
    if choice in (None, "auto"):
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        if not schemas:
            raise InvalidRequest(f"{param} is required, but there are no tools", param=param)
        return "required", None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", [_known(choice, schemas, param)]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
            raise InvalidRequest(f"{param}.allowed_tools needs a mode, auto or required, and tools", param=param)
        return mode, [_known(tool, schemas, param) for tool in tools]
    raise InvalidRequest(
        f"{param} must be none, auto, required, a function or allowed_tools", param=param
    )  # fmt: skip


def _known(choice: Any, schemas: Mapping[str, Any], param: str) -> str:
    """The name of the tool that ``choice`` means."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in schemas:
        raise InvalidRequest(f"{param} names {name!r}, which is not among the tools"[:512], param=param)
    return name
