"""What a generated text must look like, as it travels to the engine."""

from __future__ import annotations

from typing import Literal

import msgspec

ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A language that the whole answer must be in. Bounds are checked by :mod:`bough.grammar.admission`.

    Attributes:
        kind: how ``text`` is read.

            - ``json_schema``: a JSON Schema (draft 7 to 2020-12) as JSON text.
            - ``json_object``: any JSON object; ``text`` is empty.
            - ``regex``: a regular expression (Rust syntax, no look-around) that the whole answer matches.
            - ``grammar``: a context-free grammar, in Lark's notation or in EBNF (GBNF, W3C); told apart by their look.
            - ``choice``: one of a JSON list of strings.
            - ``structural_tag``: free text in which tags open constrained parts, as JSON: ``{"structures": [{"begin":
              str, "schema": {...} | "grammar": str, "end": str}, ...], "triggers": [str, ...]}``. As soon as a trigger
              was written, one of the structures whose ``begin`` starts with it must follow. The optional
              ``"at_least_one": true`` makes the answer begin with one, ``"stop_after_first": true`` ends it behind the
              first. A begin, end or trigger may be, or contain, the text of a special token, which is meant then. Or
              ``{"format": {...}}``: an answer that is put together from texts, tags, schemas, regular expressions and
              grammars, as :mod:`bough.grammar.composed` lists them.
        text: the source, see ``kind``.
        strict: refuse what cannot be enforced exactly. Otherwise keywords that cannot be are left out, and named in
            the warnings of the answer.
        whitespace: between the tokens of JSON: ``fixed`` is ", " and ": ", ``compact`` none, ``free`` up to the model;
            anything else is a regular expression.
    """

    kind: ConstraintKind
    text: str = ""
    strict: bool = True
    whitespace: str = "fixed"


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer begins with reasoning, on which a constraint has no hold.

    Attributes:
        end: ids of the tag that ends it, at least one; the constraint applies to what follows.
        budget: after this many tokens of reasoning the tag is forced; None: never.
        begin: ids of the tag that begins it; without that tag there is no reasoning. Beside a constraint its first id
            is allowed besides what the constraint allows at its beginning; once it came, the others must. Of several
            ids, the first begins the tag only where the constraint does not allow it. Empty: the prompt began it.
        firm: beside a constraint, where all of ``end`` but the last id has come, that one must.
    """

    end: tuple[int, ...]
    budget: int | None = None
    begin: tuple[int, ...] = ()
    firm: bool = False
