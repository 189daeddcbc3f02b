"""Commands that find head patterns and show them."""
