"""The KV stores: allocations of blocks and rows, copies between them, and their memory."""
