"""Prints docs/tools.md: the chat families that bough knows, from their descriptions."""

from __future__ import annotations

from bough.text.reasoning.families import FAMILIES as REASONING
from bough.text.tools.families import FAMILIES as TOOLS
from bough.text.tools.writer import write_calls

INTRODUCTION = """# Tool calls and reasoning

`tools` and `tool_choice` (`auto`, `none`, `required`, a function, `allowed_tools`), `parallel_tool_calls` and `strict`
work with every model, in streams and without. How a model writes its calls is recognised by its chat template;
`--tool-parser` names it where that fails, `none` leaves calls in the text. A model whose template knows nothing of
tools is told of them in the system message.

- `required`, a named function and `strict` are enforced while the model generates: what it writes is a call, with
  arguments that keep to the JSON Schema. With `auto` and `strict`, text is free and calls are enforced; where a
  family's calls have no mark (`json`, `llama3-json`, `pythonic`), text does not begin with `{` or `[`.
- Where a family writes strings without the quotes of JSON, `enum`, `const`, `pattern`, `format` (`date`, `time`,
  `date-time`, `hostname`, `uuid`, `ipv4`, `email`, `uri`) and lengths hold for them too. What cannot be enforced is a
  400 that names the keyword.
- What looks like a call and cannot be read stays in the content as it was written; `parse_error` of the choice says
  why. Arguments that are not a JSON object come as the model wrote them, with the same field. Responses, Anthropic's
  messages and Ollama's answers have it too; where their arguments must be an object, it is `{"raw_arguments": text}`.
  Streams of Anthropic's messages have the arguments of calls that are enforced as they are written, and of others in
  one piece when they are whole: clients of that API fail on JSON that turns out to be none.
  Where a request allows one call, it also names a further one that was left out.
- Reasoning is reported as `reasoning_content` and `reasoning`; `separate_reasoning: false` leaves it in the content,
  `stream_reasoning: false` sends it in one piece, `include_reasoning: false` drops it. Its tokens are counted in
  `usage.completion_tokens_details.reasoning_tokens`. `--reasoning-parser` names the format where the template does not
  tell it, and takes any two tags too: `--reasoning-parser '<plan>...</plan>'`.
- Past calls may have their arguments as text or as an object; the template gets what it takes, and of
  what is no JSON object `{"raw_arguments": text}`: a conversation goes on behind a call that went wrong.
- `/parse_function_call` and `/separate_reasoning` parse a text that was generated elsewhere.

A family is one description in `bough/text/tools/families.py`; parser, grammar and the writing of past calls follow
from it. This page is made by `python scripts/tool_families.py > docs/tools.md`."""


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def code(text: str) -> str:
    """``text`` as code within a cell of a table."""
    return "`" + text.replace("\n", "⏎").replace("|", "\\|").replace("`", "ˋ") + "`"


def page() -> str:
    lines = [
        INTRODUCTION,
        "",
        "## Families of `--tool-parser`",
        "",
        row("name", "also called", "a call"),
        "|---|---|---|",
    ]
    for family in sorted(TOOLS, key=lambda family: family.name):
        example = write_calls(family, [("get_weather", {"city": "Paris", "days": 2})])
        lines.append(row(family.name, ", ".join(family.aliases), code(example)))
    lines += ["", "## Formats of `--reasoning-parser`", "", row("name", "also called", "reasoning"), "|---|---|---|"]
    for form in sorted(REASONING, key=lambda form: form.name):
        lines.append(row(form.name, ", ".join(form.aliases), code(f"{form.opens}…{form.closes}")))
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
