"""A judge with several dimensions. The essay is computed once and judged in branches."""

from __future__ import annotations

from common import use_backend

import bough as sgl

DIMENSIONS = ("clarity", "originality", "evidence")
GRADES = ["poor", "fair", "good"]


@sgl.function
def judge(s, essay):
    s += sgl.system("You judge essays.")
    s += sgl.user("The essay:\n" + essay)
    forks = s.fork(len(DIMENSIONS))
    for fork, dimension in zip(forks, DIMENSIONS):
        fork += sgl.user(f"How is its {dimension}?") + sgl.assistant(sgl.select("grade", GRADES))
    forks.join()
    s += sgl.user("In one word, the essay is") + sgl.assistant(sgl.select("verdict", GRADES))


def main():
    state = judge.run("Bees matter. Without bees there are fewer apples. We should plant flowers.")
    for dimension, grade in zip(DIMENSIONS, state["grade"]):
        print(f"{dimension}: {grade}")
    print("verdict:", state["verdict"])
    return state


if __name__ == "__main__":
    use_backend()
    main()
