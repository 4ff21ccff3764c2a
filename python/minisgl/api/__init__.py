"""The HTTP API: OpenAI's and SGLang's endpoints, operations and the page."""
