"""What a chat request asks of its answer's form, and what the model makes of it: tools, reasoning, constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bough.engine.generation import GenerateOptions
from bough.server.reply import Reply, call_ids
from bough.server.schema import ChatRequest
from bough.server.service import Service
from bough.server.thinking import budget_of, reasoning_of, started_in
from bough.server.tool_memory import ToolMemory
from bough.server.tools import ToolUse
from bough.text.answer import AnswerParser
from bough.text.formats import AnswerFormat
from bough.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of one request's answers.

    Attributes:
        model: how the model writes.
        read: what of it the answer's parsers look for.
        started: whether the prompt leaves the reasoning open; None when it says nothing.
        earlier: calls in the conversation so far.
    """

    memory: ToolMemory
    tokenizer: Tokenizer
    body: ChatRequest
    use: ToolUse
    model: AnswerFormat
    read: AnswerFormat
    started: bool | None
    earlier: int

    def options(self, options: GenerateOptions) -> GenerateOptions:
        """``options`` that make the engine keep to the form. Raises InvalidRequest where it cannot be asked for."""
        thinking, budget = self.model.reasoning, budget_of(self.body, self.model)
        may_think = self.started is None and thinking is not None and not thinking.assumed
        # The grammar of the calls could tell where reasoning is, but not how long it may be.
        thinks = thinking if may_think and budget is None else None
        constraint = self.memory.constraint(self.use, self.model, self.tokenizer, thinks, options.constraint)
        reasoning = reasoning_of(
            self.model, self.tokenizer, self.started, budget, constraint is not None, constraint is options.constraint
        )
        keep = self.read.kept(self.tokenizer)
        return replace(options, keep_special=keep, constraint=constraint, reasoning=reasoning)

    def reply(self, constrained: bool) -> Reply:
        """A reader of one answer; ``constrained``: its content has to be in a language."""
        body, tokenizer = self.body, self.tokenizer
        parser = AnswerParser(
            self.read.reasoning,
            self.read.tools,
            self.use.schemas,
            started=self.started,
            hold_reasoning=bool(body.stream) and body.stream_reasoning is False,
            final_only=constrained,
        )
        skipped = tokenizer.special_ids - self.read.kept(tokenizer)
        if body.skip_special_tokens is False:
            skipped = frozenset()
        return Reply(
            parser,
            call_ids(self.read.tools, self.earlier),
            self.use.legacy,
            self.use.parallel,
            body.include_reasoning is not False,
            lambda token: 0 if token in skipped else len(tokenizer.token_bytes(token)),
        )


def answer_shape(service: Service, tokenizer: Tokenizer, body: ChatRequest, use: ToolUse, ids: list[int]) -> Shape:
    """The form of the answers to ``body``, whose prompt is ``ids``."""
    model = service.form
    read = AnswerFormat(
        model.tools if use.schemas else None, model.reasoning if body.separate_reasoning is not False else None
    )
    started = started_in(model, tokenizer, ids)
    if body.continue_final_message and model.reasoning is not None:
        said = str(body.messages[-1].get("content") or "")
        if model.reasoning.channels:
            started = False
        elif model.reasoning.opens in said:
            started = model.reasoning.closes not in said
    earlier = sum(len(message.get("tool_calls") or ()) for message in body.messages)
    return Shape(service.tools, tokenizer, body, use, model, read, started, earlier)
