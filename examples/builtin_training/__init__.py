"""How the built-in model is made: tokenizer, initialisation, data, optimiser loop, head scores, evaluation.

Run through ``examples/train_builtin_model.py``; ``docs/builtin-model.md`` explains the choices.
"""
