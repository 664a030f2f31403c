"""Bugs of constraints."""

from __future__ import annotations

from bough.grammar.compiler import GrammarCompiler
from bough.grammar.reasoning import ReasoningMatcher
from bough.scheduler.commit import Committer
from bough.scheduler.constraints import Constraints
from bough.scheduler.loop import Scheduler
from bough.scheduler.planner import Planner
from bough.scheduler.req import Req
from bough.sim.device import FakeDevice

from ..grammar import FakeTemplate
from .mechanism import simple

GRAMMAR = (
    simple(
        "mask_lags_a_token",
        "with overlap, masks were made before the token before was known",
        Scheduler,
        "_launch",
        "self._commit_all()",
        "pass",
    ),
    simple(
        "forced_tokens_unknown_to_matcher",
        "jump-forward: the matcher stood still and forced the same again",
        Constraints,
        "_forced",
        "if not guide.matcher.accept(token):",
        "if False:",
    ),
    simple(
        "jump_past_the_length",
        "forced tokens went beyond max_tokens",
        Constraints,
        "_forced",
        "req.limit - n_ids - 1",
        "req.limit - n_ids + 2",
    ),
    simple(
        "jump_over_min_tokens",
        "a forced stop token was appended where the sampler would have forbidden it",
        Constraints,
        "_forced",
        "if n_ids + len(taken) < early and",
        "if False and",
    ),
    simple(
        "constraint_lost_on_the_way_back",
        "after a preemption the answer went on without its grammar",
        Planner,
        "retract",
        "req.retractions += 1",
        "req.retractions += 1; req.guide = None",
    ),
    simple(
        "matcher_starts_again",
        "after a preemption the grammar began from its beginning",
        Planner,
        "retract",
        "req.retractions += 1",
        "req.retractions += 1; req.guide and req.guide.matcher and req.guide.matcher.__init__("
        "*([req.request.reasoning, (0, 3), req.guide.matcher.inner] if req.request.reasoning else"
        " [req.guide.matcher._automaton, -1]))",
    ),
    simple(
        "failed_compile_runs_free",
        "fail-open: the grammar was refused and the text came unconstrained",
        Constraints,
        "settle",
        "failed.append((req, error))",
        "req.guide = None; self._rows.held[:] = False; self._rows.guided[:] = False",
    ),
    simple(
        "samples_before_its_grammar",
        "the first token was sampled while the grammar was still compiled",
        Planner,
        "_plan_running",
        "known - rows.planned[running] - rows.held[running]",
        "known - rows.planned[running]",
    ),
    simple(
        "foreseen_counted_twice",
        "a token that was known and sampled was waited for for ever",
        Committer,
        "_tell_apart",
        "unknown = plan.sample & ~foreseen",
        "unknown = plan.sample",
    ),
    simple(
        "foreseen_appended_twice",
        "a token that was known and sampled came twice",
        Committer,
        "_tell_apart",
        "np.flatnonzero(sampled & unknown)",
        "np.flatnonzero(sampled)",
    ),
    simple(
        "masks_in_wrong_rows",
        "the mask of one request was applied to another",
        Constraints,
        "masks",
        "indices.append(i)",
        "indices.insert(0, i)",
    ),
    simple(
        "late_forward_forgotten",
        "a forward launched behind a failing step was sampled and committed",
        Scheduler,
        "_recover",
        "if self._forward is not None:",
        "if False:",
    ),
    simple(
        "siblings_share_a_matcher",
        "two requests with one grammar moved the same matcher",
        FakeTemplate,
        "matcher",
        "return FakeMatcher(self.automaton, self.breaks)",
        "return _shared(self)",
    ),
    simple(
        "broken_matcher_goes_on",
        "the matcher failed and the answer was cut off as if it were complete",
        Constraints,
        "accept",
        "return _given_up(req, guide.matcher)\n",
        "return None\n",
    ),
    simple(
        "reasoning_ends_the_answer",
        "the model stopped within its reasoning and the constrained part never came",
        ReasoningMatcher,
        "write",
        "for token in (*self._eos_ids, *barred):",
        "for token in barred:",
    ),
    simple(
        "reasoning_budget_off_by_one",
        "one token of reasoning too many",
        ReasoningMatcher,
        "_spent",
        "self._tokens >= self._budget",
        "self._tokens > self._budget",
    ),
    simple(
        "forced_tokens_without_logprobs",
        "a retracted request lost the logprobs of forced tokens",
        Req,
        "match_limit",
        "if self.request.params.logprobs is not None:",
        "if False:",
    ),
    simple(
        "forced_logprobs_shifted",
        "the logprobs of forced tokens were those of their neighbours",
        FakeDevice,
        "_sample",
        "self._logprob(row, first + k, token)",
        "self._logprob(row, first + k - 1, token)",
    ),
    simple(
        "compiled_again",
        "two requests that came together compiled one grammar twice",
        GrammarCompiler,
        "start",
        "if (running := self._running.get(key)) is not None:",
        "if False:",
    ),
)
