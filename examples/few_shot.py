"""Questions behind shared examples. The batch computes the examples once."""

from __future__ import annotations

from common import use_backend

import bough as sgl

EXAMPLES = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo")]


@sgl.function
def capital(s, country):
    s += "Name the capital of each country.\n"
    for known, answer in EXAMPLES:
        s += f"Country: {known}\nCapital: {answer}\n"
    s += "Country: " + country + "\nCapital:" + sgl.gen("answer", max_tokens=6, stop="\n")


def main():
    countries = ["Germany", "Norway", "Egypt", "Peru"]
    states = capital.run_batch([{"country": c} for c in countries], temperature=0)
    answers = {country: state["answer"].strip() for country, state in zip(countries, states)}
    for country, answer in answers.items():
        print(f"{country}: {answer}")
    return answers


if __name__ == "__main__":
    use_backend()
    main()
