"""What each node does to a state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bough.lang import calls, speculation, tools
from bough.lang.config import global_config
from bough.lang.ir import (
    SglAct,
    SglCommitLazy,
    SglConcateAndAppend,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglGen,
    SglImage,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglSeparateReasoning,
    SglVariable,
    SglVarScopeBegin,
    SglVarScopeEnd,
    SglVideo,
)
from bough.lang.media import encode_image_base64, encode_video_base64
from bough.lang.program import Line
from bough.lang.reasoning import split_reasoning
from bough.lang.turns import begin_role, end_role, fill

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


def describe(node: Any) -> str:
    """A node as an error names it."""
    match node:
        case SglGen(name=name):
            return f"gen({name!r})"
        case SglSelect(name=name):
            return f"select({name!r})"
        case SglAct(name=name):
            return f"act({name!r})"
        case SglExpr():
            return repr(node)
        case None:
            return "the program"
    return f"appending {node!r}"


def apply(ex: StreamExecutor, node: Any) -> bool:
    """Do what changes nothing but the state itself; False for everything else."""
    match node:
        case str():
            fill(ex, node)
        case SglConstantText(value=value):
            fill(ex, value)
        case SglRoleBegin(role=role):
            begin_role(ex, role)
        case SglRoleEnd(role=role) if not speculation.is_open(ex):
            end_role(ex, role)
        case SglVarScopeBegin(name=name):
            ex.variables[name] = len(ex.text_)
        case SglVarScopeEnd(name=name):
            ex.variables[name] = ex.text_[ex.variables[name] :]
            ex.settle(name)
        case SglExpr():
            return False
        case _:
            raise AssertionError(f"{node}")
    return True


async def perform(ex: StreamExecutor, node: Any, line: Line | None) -> None:
    """Do what :func:`apply` did not."""
    match node:
        case SglGen():
            await calls.generate(ex, node, line)
        case SglSelect():
            await calls.select(ex, node, line)
        case SglAct():
            await tools.run_tool_loop(ex, node, line)
        case SglRoleEnd(role=role):
            await calls.settle(ex, line)
            end_role(ex, role)
        case SglImage(path=path):
            _attach(ex, path, await asyncio.to_thread(encode_image_base64, path))
        case SglVideo(path=path, num_frames=num_frames):
            _attach(ex, path, await asyncio.to_thread(encode_video_base64, path, num_frames))
        case SglVariable(name=name, source_stream_executor=source):
            if name in source.variable_event:
                await source.variable_event[name].reached()
            fill(ex, source.value_of(name))
        case SglCommitLazy():
            await calls.prefill(ex, line)
        case SglConcateAndAppend(states=states):
            await _concatenate(ex, [state._executor for state in states])
        case SglSeparateReasoning():
            await _separate(ex, node.model_type, node.expr, line)
        case _:
            raise ValueError(f"Unknown type: {type(node)}")


def _attach(ex: StreamExecutor, path: Any, data: str) -> None:
    ex.images_.append((path, data))
    ex.cur_images.append((path, data))
    ex.text_ += ex.chat_template.image_token


async def _concatenate(ex: StreamExecutor, sources: list[StreamExecutor]) -> None:
    in_cache = global_config.enable_parallel_encoding and ex.backend.support_concate_and_append
    if in_cache:
        for source in sources:
            source.submit(SglCommitLazy())
    for source in sources:
        await source.idle.reached()
        if source.error_ is not None:
            raise source.failure("a state to be joined is incomplete")
    added = "".join(source.text_[source.fork_start_text_pos :] for source in sources)
    if in_cache:
        assert all(source.fork_start_text_pos == len(ex.text_) for source in sources)
        ex.text_ += added
        await ex.backend.aconcatenate_and_append([source.sid for source in sources], ex.sid)
    else:
        fill(ex, added)


async def _separate(ex: StreamExecutor, model_type: str | None, expr: SglExpr | None, line: Line | None) -> None:
    if ex.stream:
        return  # the chunks have been read already
    await calls.settle(ex, line)
    if isinstance(expr, SglExprList):
        for part in expr.expr_list:
            await _separate(ex, model_type, part, line)
    elif isinstance(expr, SglGen | SglSelect):
        reasoning, answer = split_reasoning(ex.variables[expr.name], model_type)
        name = SglSeparateReasoning(model_type, expr).name
        ex.variables[expr.name] = answer
        ex.variables[name] = reasoning
        ex.settle(name)
        ex.text_ = ex.text_[: ex.cur_role_begin_pos] + answer
