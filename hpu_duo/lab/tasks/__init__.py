"""The language of the built-in model, and the passkey documents that it was trained on."""
