"""A tree: every thought is tried, judged and continued in branches of its own; the leaves vote."""

from __future__ import annotations

from collections import Counter

from common import use_backend

import bough as sgl

WIDTH = 2


def propose(s, question):
    s += sgl.user(f"Question: {question}\nName one way to solve it, in a few words.")
    forks = s.fork(WIDTH)
    forks += sgl.assistant(sgl.gen("plan", max_tokens=16, temperature=0.8))
    return forks


def judge(s):
    s += sgl.user("How good is this plan, from 1 to 3?")
    s += sgl.assistant(sgl.select("grade", ["1", "2", "3"]))


def solve(s):
    s += sgl.user("Follow the plan. Write the result as a number.")
    forks = s.fork(WIDTH)
    forks += sgl.assistant(sgl.gen("result", type=int, max_tokens=6, temperature=0.8))
    return forks


@sgl.function
def tree_of_thought(s, question):
    plans = propose(s, question)
    for plan in plans:
        judge(plan)
    best = sorted(plans, key=lambda plan: plan["grade"])[-WIDTH:]
    leaves = [leaf for plan in best for leaf in solve(plan)]
    votes = Counter(leaf["result"] for leaf in leaves)
    return votes.most_common(1)[0][0]


def main():
    state = tree_of_thought.run("A dozen eggs and half a dozen eggs: how many eggs?")
    print("answer:", state.ret_value)
    print(state.report())
    return state


if __name__ == "__main__":
    use_backend()
    main()
