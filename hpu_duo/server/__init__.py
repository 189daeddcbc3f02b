"""An HTTP server with the OpenAI API around an engine: ``hpu-duo serve`` (docs/server.md).

``running`` needs only the engine; all HTTP modules need the extra ``serve``.
"""
