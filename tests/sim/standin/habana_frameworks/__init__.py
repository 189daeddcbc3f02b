"""A stand-in of the vendor's package, for tests: what the public bridge documents, on CPU tensors."""
