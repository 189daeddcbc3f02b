"""Adapting transformers models: probing what they are, attaching stores, running one step."""
