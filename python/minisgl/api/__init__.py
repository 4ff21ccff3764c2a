"""The HTTP API: OpenAI's endpoints, SGLang's /generate, operations and the page."""
