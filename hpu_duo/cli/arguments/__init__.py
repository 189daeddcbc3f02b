"""Arguments that commands share, and what is loaded from them."""
