"""OpenAI's Responses API as a translation onto chat completions."""
