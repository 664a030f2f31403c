"""The nodes that programs are made of: what ``s +=`` takes, and what a trace consists of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bough.lang.choices import ChoicesSamplingMethod
from bough.lang.params import REGEX_BOOL as REGEX_BOOL
from bough.lang.params import REGEX_FLOAT as REGEX_FLOAT
from bough.lang.params import REGEX_INT as REGEX_INT
from bough.lang.params import REGEX_STR as REGEX_STR
from bough.lang.params import SglSamplingParams

if TYPE_CHECKING:
    from bough.lang.tools import Tool

_ids = itertools.count()


class SglExpr:
    """A node. ``+`` with a node or a text makes a list of nodes."""

    def __init__(self) -> None:
        self.node_id = next(_ids)
        self.prev_node: SglExpr | None = None
        self.pid: str | None = None

    def __add__(self, other: str | SglExpr) -> SglExprList:
        return self.concatenate_ir(self, _node(other))

    def __radd__(self, other: str | SglExpr) -> SglExprList:
        return self.concatenate_ir(_node(other), self)

    def concatenate_ir(self, a: SglExpr, b: SglExpr) -> SglExprList:
        return SglExprList([*_parts(a), *_parts(b)])

    def print_graph_dfs(self) -> str:
        """One line for each node that this one depends on, and for itself."""
        lines: list[str] = []
        visited: set[int] = set()

        def visit(node: SglExpr | None) -> None:
            if node is None or id(node) in visited:
                return
            visited.add(id(node))
            visit(node.prev_node)
            for part in _dependencies(node):
                visit(part)
            before = ""
            if node.prev_node is not None and not isinstance(node, SglFork | SglGetForkItem):
                before = f"%{node.prev_node.node_id} + "
            lines.append(f"%{node.node_id} = {before}{node!r}\n")

        visit(self)
        return "".join(lines)


def _node(value: str | SglExpr) -> SglExpr:
    if isinstance(value, str):
        return SglConstantText(value)
    assert isinstance(value, SglExpr), f"{value}"
    return value


def _parts(node: SglExpr) -> list[SglExpr]:
    return node.expr_list if isinstance(node, SglExprList) else [node]


def _dependencies(node: SglExpr) -> list[SglExpr]:
    if isinstance(node, SglExprList):
        return node.expr_list
    return [node.source] if isinstance(node, SglVariable) and isinstance(node.source, SglExpr) else []


class SglExprList(SglExpr):
    def __init__(self, expr_list: list[SglExpr]) -> None:
        super().__init__()
        self.expr_list = expr_list

    def __repr__(self) -> str:
        return f"ExprList({self.expr_list})"


class SglArgument(SglExpr):
    """Stands for an argument whose value is not known while a program is traced."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"Argument(name={self.name}, value={self.value!r})"

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, i: Any) -> Any:
        return self.value[i]

    def __int__(self) -> int:
        raise TypeError(f"the argument {self.name!r} has no value while the program is traced")

    def __bool__(self) -> bool:
        raise TypeError(f"the argument {self.name!r} has no value while the program is traced")

    def __format__(self, spec: str) -> str:
        raise TypeError("Cannot put argument inside a f-string. This is not compatible with the tracer.")


class SglImage(SglExpr):
    """``path``: of a file, or the bytes of one, or a PIL image."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self.path = path

    def __repr__(self) -> str:
        return f"SglImage({self.path})"


class SglVideo(SglExpr):
    def __init__(self, path: str, num_frames: int) -> None:
        super().__init__()
        self.path = path
        self.num_frames = num_frames

    def __repr__(self) -> str:
        return f"SglVideo({self.path}, {self.num_frames})"


class SglGen(SglExpr):
    """A generation.

    ``type`` is the Python type of its value, ``reask`` how often the model is told what is wrong with an answer and
    asked again, ``validate`` a function that raises ValueError for a value that will not do.
    ``lora_path`` names an adapter.
    """

    def __init__(
        self,
        name: str | None = None,
        max_new_tokens: int | None = None,
        min_new_tokens: int | None = None,
        n: int | None = None,
        stop: Any = None,
        stop_token_ids: list[int] | None = None,
        stop_regex: Any = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        ignore_eos: bool | None = None,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        dtype: Any = None,
        regex: str | None = None,
        json_schema: str | None = None,
        *,
        type: Any = None,
        reask: int = 0,
        validate: Callable[[Any], object] | None = None,
        lora_path: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.sampling_params = SglSamplingParams(
            max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, n=n, stop=stop, stop_regex=stop_regex,
            stop_token_ids=stop_token_ids, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
            frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, ignore_eos=ignore_eos,
            return_logprob=return_logprob, logprob_start_len=logprob_start_len, top_logprobs_num=top_logprobs_num,
            return_text_in_logprobs=return_text_in_logprobs, dtype=dtype, regex=regex, json_schema=json_schema,
        )  # fmt: skip
        self.type = type
        self.reask = reask
        self.validate = validate
        self.lora_path = lora_path

    def __repr__(self) -> str:
        return f"Gen('{self.name}')"


class SglConstantText(SglExpr):
    def __init__(self, value: str) -> None:
        super().__init__()
        self.value = value

    def __repr__(self) -> str:
        return f"Constant({self.value!r})"


class SglRoleBegin(SglExpr):
    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def __repr__(self) -> str:
        return f"RoleBegin({self.role})"


class SglRoleEnd(SglExpr):
    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def __repr__(self) -> str:
        return f"RoleEnd({self.role})"


class SglSelect(SglExpr):
    def __init__(
        self,
        name: str | None,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
        lora_path: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.choices = choices
        self.temperature = temperature
        self.choices_method = choices_method
        self.lora_path = lora_path

    def __repr__(self) -> str:
        return f"Select({self.name}, choices={self.choices}, choices_method={self.choices_method})"


class SglAct(SglExpr):
    """A loop of tool calls that ends with an answer, see :func:`bough.lang.api.act`."""

    def __init__(self, name: str | None, tools: list[Tool], max_steps: int, answer: SglGen) -> None:
        super().__init__()
        self.name = name
        self.tools = tools
        self.max_steps = max_steps
        self.answer = answer

    def __repr__(self) -> str:
        return f"Act('{self.name}', tools={[tool.name for tool in self.tools]})"


class SglFork(SglExpr):
    def __init__(self, number: int, position_ids_offset: list[int] | None = None) -> None:
        super().__init__()
        self.number = number
        self.position_ids_offset = position_ids_offset

    def __repr__(self) -> str:
        before = None if self.prev_node is None else self.prev_node.node_id
        return f"Fork(%{before}, number={self.number}, position_ids_offset={self.position_ids_offset})"


class SglGetForkItem(SglExpr):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def __repr__(self) -> str:
        before = None if self.prev_node is None else self.prev_node.node_id
        return f"GetForkItem(%{before}, index={self.index})"


class SglVariable(SglExpr):
    """The value of a variable of another state; ``source_stream_executor`` is that state's."""

    def __init__(self, name: str, source: Any) -> None:
        super().__init__()
        self.name = name
        self.source = source
        self.source_stream_executor: Any = None

    def __repr__(self) -> str:
        return f"Variable('{self.name}', source=%{self.source.node_id})"


class SglVarScopeBegin(SglExpr):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __repr__(self) -> str:
        return f"VarScopeBegin('{self.name}')"


class SglVarScopeEnd(SglExpr):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __repr__(self) -> str:
        return f"VarScopeEnd('{self.name}')"


class SglConcateAndAppend(SglExpr):
    def __init__(self, states: list[Any]) -> None:
        super().__init__()
        self.states = states

    def __repr__(self) -> str:
        return f"ConcatenateAndAppend('{self.states}')"


class SglCommitLazy(SglExpr):
    """Have the text so far computed."""

    def __repr__(self) -> str:
        return "CommitLazy()"


class SglLease(SglExpr):
    """Have the text so far kept for ``ttl`` seconds."""

    def __init__(self, ttl: float) -> None:
        super().__init__()
        self.ttl = ttl

    def __repr__(self) -> str:
        return f"Lease({self.ttl:g})"


class SglSeparateReasoning(SglExpr):
    """Take the reasoning out of what ``expr`` generated; its ``name`` is the variable that the reasoning goes to."""

    def __init__(self, model_type: str | None, expr: SglExpr | None) -> None:
        super().__init__()
        self.model_type = model_type
        self.expr = expr
        self.name: str | None = None
        for part in _parts(expr) if expr is not None else []:
            if isinstance(part, SglGen | SglSelect):
                self.name = self.process_name_for_reasoning(part.name)

    def process_name_for_reasoning(self, name: str | None) -> str:
        if not name:
            raise ValueError("name must be provided")
        return f"{name}_reasoning_content"

    def __repr__(self) -> str:
        return f"SeparateReasoning(model_type={self.model_type}, name={self.name})"
