"""The KV cache: stores, allocation of blocks and rows, copies, the prefix cache, and memory planning."""
