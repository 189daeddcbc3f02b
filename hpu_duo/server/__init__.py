"""An HTTP server with the OpenAI API around an engine: ``hpu-duo serve`` (docs/server.md).

``running`` needs nothing but the engine; everything that speaks HTTP needs the extra ``serve``.
"""
