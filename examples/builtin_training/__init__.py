"""Training of the built-in model: tokenizer, initialisation, data, optimiser loop, head scores, evaluation.

Run through ``examples/train_builtin_model.py``; ``docs/builtin-model.md`` explains the choices.
"""
