"""An agent: the model calls tools until it knows the answer. What it may write is constrained to the tools' types."""

from __future__ import annotations

from common import use_backend

import bough as sgl

POPULATION = {"Oslo": 717_710, "Bergen": 291_940, "Trondheim": 214_565}


@sgl.tool
def population(city: str) -> int:
    """How many people live in a city of Norway."""
    return POPULATION[city]


@sgl.tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@sgl.function(limits=sgl.Limits(tokens=400))
def agent(s, question):
    s += sgl.system(sgl.tools_prompt([population, add]))
    for city in ("Bergen", "Trondheim"):
        s += sgl.user(f"How many people live in {city}?")
        s += sgl.assistant(f'{{"tool": "population", "arguments": {{"city": "{city}"}}}}')
        s += sgl.user(f"population: {POPULATION[city]}")
        s += sgl.assistant(f'{{"tool": "answer", "arguments": {{"answer": {POPULATION[city]}}}}}')
    s += sgl.user(question)
    s += sgl.act("answer", tools=[population, add], max_steps=3, type=int, max_tokens=40)


def main():
    state = agent.run("How many people live in Oslo?", temperature=0)
    for call in state.get_meta_info("answer")["tool_calls"]:
        print(f"{call['tool']}({call['arguments']}) -> {call['error'] or call['result']}")
    print("answer:", state["answer"])
    return state


if __name__ == "__main__":
    use_backend()
    main()
