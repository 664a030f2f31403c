"""A question about several documents, each of which is read in a branch and appended."""

from __future__ import annotations

from common import use_backend

import bough as sgl

DOCUMENTS = [
    "Ann Berg lives in Oslo and works as a baker.",
    "Bob Lund lives in Rome. He has two dogs.",
    "Eva Holm lives in Lima, where she teaches music.",
]


@sgl.function
def answer(s, question):
    s += "Read the documents and answer the question.\n"
    forks = s.fork(len(DOCUMENTS))
    forks += lambda i: f"Document {i + 1}: {DOCUMENTS[i]}\n"
    forks.join("concate_and_append")
    s += "Question: " + question + "\nAnswer:" + sgl.gen("answer", max_tokens=8, stop="\n")


def main():
    state = answer.run("How many dogs does Bob Lund have?", temperature=0)
    print(state["answer"].strip())
    return state


if __name__ == "__main__":
    use_backend()
    main()
